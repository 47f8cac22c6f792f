// Logarithms, computed from the exponent and a polynomial of the mantissa.
#pragma once

#include "arithmetic.h"

namespace dev {

// log(1 + f) - f for sqrt(1/2) <= 1 + f <= sqrt(2), with an error of 2^-27 relative to log(1 + f).
DEV_INLINE float log1p_rest(float f) {
    float p = -0.07634486f;
    p = fused(p, f, 0.12761565f);
    p = fused(p, f, -0.13160181f);
    p = fused(p, f, 0.1420176f);
    p = fused(p, f, -0.16623358f);
    p = fused(p, f, 0.20001227f);
    p = fused(p, f, -0.2500082f);
    p = fused(p, f, 0.3333333f);
    float square = f * f;
    return fused(square * f, p, -0.5f * square);
}

// The parts of a normal, positive number x = 2^n * mantissa, with sqrt(1/2) <= mantissa <= sqrt(2).
struct Parts {
    float mantissa;
    float n;
};

DEV_INLINE Parts parts_of(float x) {
    constexpr uint32_t root_half = 0x3F3504F3u;
    uint32_t bits = bits_of(x) - root_half;
    return {from_bits((bits & 0x007FFFFFu) + root_half), float(int32_t(bits) >> 23)};
}

// Like `parts_of`, for all positive numbers, including denormal numbers.
DEV_INLINE Parts normalized_parts(float x) {
    bool denormal = x < 0x1p-126f;
    Parts y = parts_of(denormal ? x * 0x1p23f : x);
    return {y.mantissa, denormal ? y.n - 23.0f : y.n};
}

// `result`, except for arguments for which the polynomial is not valid: NaN for NaN and for negative numbers, and the
// limits at 0 and infinity.
DEV_INLINE float log_or_limit(float x, float result) {
    float number = x < infinity<float>() ? result : x;
    number = x == 0.0f ? -infinity<float>() : number;
    return x < 0.0f ? nan<float>() : number;
}

constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;

DEV_INLINE float log(float x) {
    Parts y = normalized_parts(x);
    float f = y.mantissa - 1.0f;
    return log_or_limit(x, fused(y.n, ln2_high, fused(y.n, ln2_low, log1p_rest(f)) + f));
}

DEV_INLINE float log2(float x) {
    Parts y = normalized_parts(x);
    float f = y.mantissa - 1.0f;
    // 1 / ln 2 is represented as the sum of two floats.
    float of_mantissa = fused(f, 0x1.715476p0f, fused(f, 0x1.4ae0cp-26f, log1p_rest(f) * 0x1.715476p0f));
    return log_or_limit(x, y.n + of_mantissa);
}

DEV_INLINE float log10(float x) {
    Parts y = normalized_parts(x);
    float f = y.mantissa - 1.0f;
    // 1 / ln 10 and log10(2) are represented as sums of two floats. The first float of log10(2) has few bits,
    // so its product with n is exact.
    float of_mantissa = fused(f, 0x1.bcb7b2p-2f, fused(f, -0x1.5b235ep-27f, log1p_rest(f) * 0x1.bcb7b2p-2f));
    return log_or_limit(x, fused(y.n, 0x1.344p-2f, fused(y.n, 0x1.3509f8p-18f, of_mantissa)));
}

DEV_INLINE float log1p(float x) {
    float sum = 1.0f + x;
    // The rounding error of the sum, relative to the sum.
    float lost = (x < 1.0f ? x - (sum - 1.0f) : 1.0f - (sum - x)) / sum;
    Parts y = parts_of(sum);
    bool near = y.n == 0.0f;
    float f = near ? x : y.mantissa - 1.0f;
    float correction = fused(y.n, ln2_low, near ? 0.0f : lost);
    float result = fused(y.n, ln2_high, (log1p_rest(f) + correction) + f);
    return x == 0.0f ? x : log_or_limit(sum, result);
}

DEV_INLINE double log(double x) { return __builtin_log(x); }
DEV_INLINE double log2(double x) { return __builtin_log2(x); }
DEV_INLINE double log10(double x) { return __builtin_log10(x); }
DEV_INLINE double log1p(double x) { return __builtin_log1p(x); }

}  // namespace dev
