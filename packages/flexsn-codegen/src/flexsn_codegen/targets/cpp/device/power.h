// `pow` and `hypot`.
#pragma once

#include "logarithm.h"

namespace dev {

// The base-2 logarithm of a number that is not negative, with an error of 2^-45.
DEV_INLINE double wide_log2(float x) {
    Parts y = normalized_parts(x);
    double m = double(y.mantissa);
    double s = (m - 1.0) / (m + 1.0);
    double square = s * s;
    double p = 0.28290144493216884;
    p = fused(p, square, 0.3199056120068346);
    p = fused(p, square, 0.41220925432246486);
    p = fused(p, square, 0.5770779423468428);
    p = fused(p, square, 0.9617966941134005);
    p = fused(p, square, 2.88539008177785);
    double result = fused(p, s, double(y.n));
    result = x == 0.0f ? -infinity<double>() : result;
    return x < infinity<float>() ? result : double(x);
}

// 2^x with a relative error of 2^-40. If float32 cannot represent 2^x, the result is any number that is too large or
// too small for float32, too.
DEV_INLINE double wide_exp2(double x) {
    constexpr double shift = 0x1.8p52;
    double above = x < -200.0 ? -200.0 : x;
    double inside = above > 200.0 ? 200.0 : above;
    double shifted = inside + shift;
    double r = inside - (shifted - shift);
    double p = 1.3178924114979294e-06;
    p = fused(p, r, 1.5309155972282963e-05);
    p = fused(p, r, 0.0001540382550351918);
    p = fused(p, r, 0.0013333454861464457);
    p = fused(p, r, 0.009618128616074088);
    p = fused(p, r, 0.05550410935265079);
    p = fused(p, r, 0.2402265069811075);
    p = fused(p, r, 0.6931471805482129);
    double power = from_bits((bits_of(shifted) << 52) + bits_of(1.0));
    return fused(p, r, 1.0) * power;
}

// Computed in float64, with the special cases of IEEE 754-2019, section 9.2.1.
DEV_INLINE float pow(float x, float y) {
    float a = abs(x);
    float size = float(wide_exp2(double(y) * wide_log2(a)));
    size = a == 1.0f && y == y ? 1.0f : size;
    float half = 0.5f * y;
    bool is_whole = trunc(y) == y, is_odd = is_whole && trunc(half) != half;
    float result = is_odd ? copysign(size, x) : size;
    result = x < 0.0f && a < infinity<float>() && !is_whole ? nan<float>() : result;
    return x == 1.0f || y == 0.0f ? 1.0f : result;
}

DEV_INLINE float hypot(float x, float y) { return float(__builtin_hypot(double(x), double(y))); }

DEV_INLINE double pow(double x, double y) { return __builtin_pow(x, y); }
DEV_INLINE double hypot(double x, double y) { return __builtin_hypot(x, y); }

}  // namespace dev
