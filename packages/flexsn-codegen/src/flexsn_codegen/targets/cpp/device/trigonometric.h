// sin, cos and tan.
#pragma once

#include "arithmetic.h"

namespace dev {

DEV_INLINE float sin(float x) { return std::sin(x); }
DEV_INLINE double sin(double x) { return std::sin(x); }
DEV_INLINE float cos(float x) { return std::cos(x); }
DEV_INLINE double cos(double x) { return std::cos(x); }
DEV_INLINE float tan(float x) { return std::tan(x); }
DEV_INLINE double tan(double x) { return std::tan(x); }

}  // namespace dev
