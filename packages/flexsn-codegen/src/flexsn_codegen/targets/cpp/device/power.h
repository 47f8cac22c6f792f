// Powers.
#pragma once

#include "arithmetic.h"

namespace dev {

DEV_INLINE float pow(float x, float y) { return std::pow(x, y); }
DEV_INLINE double pow(double x, double y) { return std::pow(x, y); }
DEV_INLINE float hypot(float x, float y) { return std::hypot(x, y); }
DEV_INLINE double hypot(double x, double y) { return std::hypot(x, y); }

}  // namespace dev
