// What the other headers need before them: integer types, and functions that are always inline. No header of C++ is
// included anywhere: to read <tuple> takes longer than to compile a small kernel.
#pragma once

#include <stdint.h>

// Forced, because a call that is left in a loop keeps it from becoming vector code.
#define DEV_MEMBER inline __attribute__((always_inline))
#define DEV_INLINE static DEV_MEMBER
