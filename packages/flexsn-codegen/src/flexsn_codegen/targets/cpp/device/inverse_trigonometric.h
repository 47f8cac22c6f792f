// Inverse trigonometric and inverse hyperbolic functions.
#pragma once

#include "arithmetic.h"

namespace dev {

// atan(t) for 0 <= t <= 1.
DEV_INLINE float atan_to_one(float t) {
    float square = t * t;
    float p = -0.0017936272f;
    p = fused(p, square, 0.010914633f);
    p = fused(p, square, -0.031177903f);
    p = fused(p, square, 0.057957657f);
    p = fused(p, square, -0.08403455f);
    p = fused(p, square, 0.10952187f);
    p = fused(p, square, -0.14264242f);
    p = fused(p, square, 0.19998549f);
    p = fused(p, square, -0.333333f);
    return fused(p * square, t, t);
}

DEV_INLINE float atan(float x) {
    float a = abs(x);
    bool far = a > 1.0f;
    // atan(a) = pi / 2 - atan(1 / a).
    float t = far ? 1.0f / a : a;
    float near = atan_to_one(t);
    // pi / 2 is represented as the difference of two floats.
    return copysign(far ? 0x1.921fb6p0f - (near + 0x1.777a5cp-25f) : near, x);
}

DEV_INLINE double atan(double x) { return __builtin_atan(x); }
DEV_INLINE float asin(float x) { return float(__builtin_asin(double(x))); }
DEV_INLINE double asin(double x) { return __builtin_asin(x); }
DEV_INLINE float acos(float x) { return float(__builtin_acos(double(x))); }
DEV_INLINE double acos(double x) { return __builtin_acos(x); }
DEV_INLINE float asinh(float x) { return float(__builtin_asinh(double(x))); }
DEV_INLINE double asinh(double x) { return __builtin_asinh(x); }
DEV_INLINE float acosh(float x) { return float(__builtin_acosh(double(x))); }
DEV_INLINE double acosh(double x) { return __builtin_acosh(x); }
DEV_INLINE float atanh(float x) { return float(__builtin_atanh(double(x))); }
DEV_INLINE double atanh(double x) { return __builtin_atanh(x); }

DEV_INLINE float atan2(float y, float x) {
    float a = abs(y), b = abs(x);
    float high = a > b ? a : b, low = a > b ? b : a;
    bool beyond = high == infinity<float>();
    float t = low / (high == 0.0f ? 1.0f : high);
    t = beyond ? (low == high ? 1.0f : 0.0f) : t;
    float near = atan_to_one(t);
    // pi / 2 and pi are represented as differences of two floats.
    float angle = a > b ? 0x1.921fb6p0f - (near + 0x1.777a5cp-25f) : near;
    angle = signbit(x) ? 0x1.921fb6p1f - (angle + 0x1.777a5cp-24f) : angle;
    return x != x || y != y ? x + y : copysign(angle, y);
}

DEV_INLINE double atan2(double y, double x) { return __builtin_atan2(y, x); }

}  // namespace dev
