// atan and the others of its kind.
#pragma once

#include "arithmetic.h"

namespace dev {

DEV_INLINE float atan(float x) {
    float a = abs(x);
    bool far = a > 1.0f;
    // atan(a) = pi / 2 - atan(1 / a).
    float t = far ? 1.0f / a : a;
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
    float near = fused(p * square, t, t);
    // pi / 2 in two parts.
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

// In float64, to 2^-40 before it is rounded. The smaller of the two is divided by the larger one; what is above
// tan(pi / 8), where the polynomial ends, is turned by pi / 4.
DEV_INLINE float atan2(float y, float x) {
    constexpr double largest = 0x1p1000;  // for infinity, whose differences are no numbers
    double a = abs(double(y)), b = abs(double(x));
    a = a > largest ? largest : a;
    b = b > largest ? largest : b;
    double high = a > b ? a : b, low = a > b ? b : a;
    bool turned = low > 0.41421356237309503 * high;
    double divisor = turned ? low + high : high;
    double t = (turned ? low - high : low) / (divisor == 0.0 ? 1.0 : divisor);
    double square = t * t;
    double p = -0.03770166675414705;
    p = fused(p, square, 0.0697700120117841);
    p = fused(p, square, -0.08993216380900675);
    p = fused(p, square, 0.11103534816380306);
    p = fused(p, square, -0.14285391253697707);
    p = fused(p, square, 0.19999993188728984);
    p = fused(p, square, -0.3333333327838282);
    double angle = fused(p * square, t, t) + (turned ? 0.7853981633974483 : 0.0);
    angle = a > b ? 1.5707963267948966 - angle : angle;
    angle = signbit(x) ? 3.141592653589793 - angle : angle;
    float result = copysign(float(angle), y);
    return x != x || y != y ? x + y : result;
}

DEV_INLINE double atan2(double y, double x) { return __builtin_atan2(y, x); }

}  // namespace dev
