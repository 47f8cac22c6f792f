// exp, and related functions.
//
// Arguments are reduced by multiples of ln 2, which is represented as two parts (Cody and Waite, Software Manual for
// the Elementary Functions, 1980). The polynomials minimize the maximum of the relative error. They were
// computed by Remez's algorithm.
#pragma once

#include "arithmetic.h"

namespace dev {

// 2^n, for -126 <= n <= 127.
DEV_INLINE float power_of_two(int32_t n) { return from_bits(uint32_t(n + 127) << 23); }

// x = n * scale + rest, where n is the integer nearest to x / scale. The product of n with the high part of `scale` is
// exact.
struct Reduced {
    float rest;
    int32_t n;
};

DEV_INLINE Reduced reduced(float x, float inverse, float high, float low) {
    // The lowest bit of numbers near `shift` is worth 1. Therefore, the sum is rounded to an integer, which is in the
    // low bits of the sum. For NaN, these bits have no meaning.
    constexpr float shift = 0x1.8p23f;
    float shifted = fused(x, inverse, shift);
    float n = shifted - shift;
    float rest = fused(-n, low, fused(-n, high, x));
    return {rest, int32_t(bits_of(shifted) - bits_of(shift))};
}

DEV_INLINE Reduced reduced_by_ln2(float x) { return reduced(x, 0x1.715476p0f, 0x1.62e4p-1f, 0x1.7f7d1cp-20f); }

// exp(r) - 1 for abs(r) <= ln(2) / 2, with an error of 2^-26.
DEV_INLINE float expm1_near_zero(float r) {
    float p = 0.0013882526f;
    p = fused(p, r, 0.008366514f);
    p = fused(p, r, 0.0416672f);
    p = fused(p, r, 0.16666543f);
    p = fused(p, r, 0.49999997f);
    return fused(r * r, p, r);
}

// x * 2^n, for factors 2^n that may be too small or too large for float32.
DEV_INLINE float scaled(float x, int32_t n) {
    int32_t half = n >> 1;
    return x * power_of_two(half) * power_of_two(n - half);
}

// `x`, clamped to [low, high]. NaN remains NaN.
DEV_INLINE float clamped(float x, float low, float high) {
    float above = x < low ? low : x;
    return above > high ? high : above;
}

// `x`, clamped to [low, high], for low < 0 < high. For NaN, the result is `low` or `high`. Two comparisons of
// floating-point numbers compile to nine instructions, and two comparisons of their bits compile to two. The bits of
// positive numbers are in the order of the numbers. The bits of negative numbers, as unsigned integers, are larger than
// those of positive numbers, and are in reverse order.
DEV_INLINE float clamped_number(float x, float low, float high) {
    uint32_t above = bits_of(x) < bits_of(low) ? bits_of(x) : bits_of(low);
    int32_t inside = int32_t(above) < int32_t(bits_of(high)) ? int32_t(above) : int32_t(bits_of(high));
    return from_bits(uint32_t(inside));
}

DEV_INLINE float exp(float x) {
    // `x` is reduced as in `reduced`, but the sum also contains twice the bias of an exponent, because 2^n is the
    // product of two powers, as in `scaled`.
    constexpr float shift = 0x1.8p23f + 254.0f;
    float inside = clamped_number(x, -104.0f, 89.0f);
    float shifted = fused(inside, 0x1.715476p0f, shift);
    float n = shifted - shift;
    float rest = fused(-n, 0x1.7f7d1cp-20f, fused(-n, 0x1.62e4p-1f, inside));
    uint32_t bits = bits_of(shifted), half = bits >> 1;
    float power = from_bits(half << 23);
    // This sum is rounded as if `power` were 1.
    float result = fused(power, expm1_near_zero(rest), power) * from_bits((bits - half) << 23);
    return x != x ? x : result;
}

DEV_INLINE float exp2(float x) {
    Reduced y = reduced(clamped(x, -151.0f, 129.0f), 1.0f, 1.0f, 0.0f);
    return scaled(1.0f + expm1_near_zero(y.rest * 0x1.62e43p-1f), y.n);
}

DEV_INLINE float expm1(float x) {
    Reduced y = reduced_by_ln2(clamped(x, -18.0f, 89.0f));
    // 2^n q + (2^n - 1) for q = exp(rest) - 1, computed with 2^(n - 1), because float32 cannot represent 2^128.
    float half = power_of_two(y.n - 1);
    float result = 2.0f * fused(half, expm1_near_zero(y.rest), half - 0.5f);
    return x == 0.0f ? x : result;
}

DEV_INLINE float tanh(float x) {
    float a = abs(x);
    float square = a * a;
    float p = -0.0057049845f;
    p = fused(p, square, 0.020639084f);
    p = fused(p, square, -0.053739715f);
    p = fused(p, square, 0.13331442f);
    p = fused(p, square, -0.3333328f);
    float near = fused(p * square, a, a);
    // 1 - 2 / (exp(2 a) + 1). From a = 9.1 on, the result is 1.
    Reduced y = reduced_by_ln2(2.0f * (a > 10.0f ? 10.0f : a));
    float power = power_of_two(y.n);
    float far = 1.0f - 2.0f / (fused(power, expm1_near_zero(y.rest), power) + 1.0f);
    return copysign(a < 0.625f ? near : far, x);
}

DEV_INLINE float sinh(float x) { return float(__builtin_sinh(double(x))); }
DEV_INLINE float cosh(float x) { return float(__builtin_cosh(double(x))); }

DEV_INLINE double exp(double x) { return __builtin_exp(x); }
DEV_INLINE double expm1(double x) { return __builtin_expm1(x); }
DEV_INLINE double exp2(double x) { return __builtin_exp2(x); }
DEV_INLINE double sinh(double x) { return __builtin_sinh(x); }
DEV_INLINE double cosh(double x) { return __builtin_cosh(x); }
DEV_INLINE double tanh(double x) { return __builtin_tanh(x); }

}  // namespace dev
