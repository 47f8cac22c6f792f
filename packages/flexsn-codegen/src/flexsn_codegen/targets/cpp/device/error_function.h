// The error function and the logarithm of the gamma function.
#pragma once

#include "arithmetic.h"

namespace dev {

DEV_INLINE float erf(float x) { return std::erf(x); }
DEV_INLINE double erf(double x) { return std::erf(x); }
DEV_INLINE float erfc(float x) { return std::erfc(x); }
DEV_INLINE double erfc(double x) { return std::erfc(x); }
DEV_INLINE float lgamma(float x) { return std::lgamma(x); }
DEV_INLINE double lgamma(double x) { return std::lgamma(x); }

}  // namespace dev
