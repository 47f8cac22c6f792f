// Integer types, and macros for functions that are always inline. All other headers use these types and macros. Only
// `special.h` includes a header of the C++ library, because g++ takes as long to read <tuple> as to compile a small
// kernel.
#pragma once

#include <stdint.h>

// Inlining is forced, because a loop that contains a call does not become vector code.
#define DEV_MEMBER inline __attribute__((always_inline))
#define DEV_INLINE static DEV_MEMBER
