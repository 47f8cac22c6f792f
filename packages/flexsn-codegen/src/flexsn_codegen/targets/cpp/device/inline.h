// Integer types, and functions that are always inline, for the other headers. Except for `special.h`, none includes a
// header of C++: g++ reads <tuple> for as long as it compiles a small kernel.
#pragma once

#include <stdint.h>

// Forced, because a call that is left in a loop keeps it from becoming vector code.
#define DEV_MEMBER inline __attribute__((always_inline))
#define DEV_INLINE static DEV_MEMBER
