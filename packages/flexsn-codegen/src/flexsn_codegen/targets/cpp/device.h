// The functions that generated sources call. They are in namespace `dev`, and are overloaded for float and double.
//
// The float32 functions that neurons use most have no branch and call no library, so that a loop around them becomes
// vector code. The compiler needs `-fno-math-errno -fno-trapping-math` for this. With `-ffp-contract=off`,
// the results of arithmetic have the bits of eager mode. Other results are near those of eager mode. Special functions
// are in `special.h`, which takes longer to compile than all of these headers.
#pragma once

#include "device/arithmetic.h"
#include "device/error_function.h"
#include "device/exponential.h"
#include "device/inverse_trigonometric.h"
#include "device/logarithm.h"
#include "device/power.h"
#include "device/random.h"
#include "device/types.h"
