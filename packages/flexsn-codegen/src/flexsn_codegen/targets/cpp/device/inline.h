// Integer types, and macros for functions that are always inline. All other headers use them. Only `special.h` includes
// a header of the C++ library, because g++ reads <tuple> for as long as it compiles a small kernel.
#pragma once

#include <stdint.h>

// Inlining is forced, because a loop that contains a call does not become vector code.
#define DEV_MEMBER inline __attribute__((always_inline))
#define DEV_INLINE static DEV_MEMBER
