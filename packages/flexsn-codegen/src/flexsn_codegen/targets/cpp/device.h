// What generated sources call: everything in namespace `dev`. Of float and double, as one set of overloaded names.
//
// The functions of float32 that neurons use most have no branch and call no library, so that a loop around them becomes
// vector code; `-fno-math-errno -fno-trapping-math` are needed for that, and `-ffp-contract=off` for the bits of eager
// mode. Special functions are in `special.h`, which takes longer to compile than all of these.
#pragma once

#include "device/arithmetic.h"
#include "device/error_function.h"
#include "device/exponential.h"
#include "device/inverse_trigonometric.h"
#include "device/logarithm.h"
#include "device/power.h"
#include "device/random.h"
#include "device/types.h"
