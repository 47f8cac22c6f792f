// Arithmetic. Results are exact or rounded once, except for results of `rsqrt`, and of `fused` on some processors. They
// have the bits of eager mode on the CPU, unless eager mode is less exact.
//
// Functions of the C library are called as builtins of the compiler, because <cmath> takes long to read.
#pragma once

#include "types.h"

namespace dev {

// x * y + z. The result is rounded once if the processor has an instruction for fused multiply-add, otherwise twice.
DEV_INLINE float fused(float x, float y, float z) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(x, y, z);
#else
    return x * y + z;
#endif
}

DEV_INLINE double fused(double x, double y, double z) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fma(x, y, z);
#else
    return x * y + z;
#endif
}

DEV_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
DEV_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
DEV_INLINE float rsqrt(float x) { return 1.0f / sqrt(x); }
DEV_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
DEV_INLINE float floor(float x) { return __builtin_floorf(x); }
DEV_INLINE double floor(double x) { return __builtin_floor(x); }
DEV_INLINE float ceil(float x) { return __builtin_ceilf(x); }
DEV_INLINE double ceil(double x) { return __builtin_ceil(x); }
DEV_INLINE float trunc(float x) { return __builtin_truncf(x); }
DEV_INLINE double trunc(double x) { return __builtin_trunc(x); }
DEV_INLINE float round(float x) { return __builtin_rintf(x); }  // ties go to even
DEV_INLINE double round(double x) { return __builtin_rint(x); }
DEV_INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
DEV_INLINE double copysign(double x, double y) { return __builtin_copysign(x, y); }
DEV_INLINE bool signbit(float x) { return bits_of(x) >> 31 != 0; }
DEV_INLINE bool signbit(double x) { return bits_of(x) >> 63 != 0; }

DEV_INLINE float abs(float x) { return __builtin_fabsf(x); }
DEV_INLINE double abs(double x) { return __builtin_fabs(x); }

// -- remainders ------------------------------------------------------------------------------------------------

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
// `fmod` is exact, and has no branch. The quotient of the largest number and the smallest number has 277 bits. Each
// call of `reduced_by` removes 50 of these bits. The rest is always a multiple of the last bit of `x` or of `y`,
// whichever is smaller, so the result of each product and difference, which is rounded once, is exact.
DEV_INLINE double reduced_by(double rest, double divisor, double inverse, double shift) {
    double n = round(rest * (inverse * (1.0 / shift)));
    return fused(-n, divisor * shift, rest);
}

DEV_INLINE float fmod(float x, float y) {
    double divisor = abs(double(y)), inverse = 1.0 / divisor;
    double rest = reduced_by(abs(double(x)), divisor, inverse, 0x1p250);
    rest = reduced_by(rest, divisor, inverse, 0x1p200);
    rest = reduced_by(rest, divisor, inverse, 0x1p150);
    rest = reduced_by(rest, divisor, inverse, 0x1p100);
    rest = reduced_by(rest, divisor, inverse, 0x1p50);
    rest = reduced_by(rest, divisor, inverse, 1.0);
    float result = float(rest < 0.0 ? rest + divisor : rest);
    bool whole = abs(y) == infinity<float>() && abs(x) < infinity<float>();
    return copysign(whole ? x : result, x);
}
#else
DEV_INLINE float fmod(float x, float y) { return __builtin_fmodf(x, y); }
#endif
DEV_INLINE double fmod(double x, double y) { return __builtin_fmod(x, y); }

// The remainder with the sign of `y`.
template <typename T>
DEV_INLINE T remainder(T x, T y) {
    T rest = fmod(x, y);
    return rest != T(0) && (y < T(0)) != (rest < T(0)) ? rest + y : rest;
}

// -- conversions -----------------------------------------------------------------------------------------------

// Rounds towards zero. For NaN and for numbers out of range, the result is the smallest integer, as in conversions of
// x86, and therefore in eager mode on x86.
template <typename To, typename From>
DEV_INLINE To whole(From x) {
    constexpr From end = From(To(1) << (8 * sizeof(To) - 2)) * From(2);
    bool inside = x >= -end && x < end;
    To number = To(inside ? x : From(0));
    return inside ? number : To(-end);
}

// Converts a floating-point number to an integer type as eager mode does: to uint32, and from double to uint8, via
// int64, and to all other narrow types via int32. These conversions keep the low bits, so numbers that are too large
// for the narrower type wrap around.
template <typename To, typename From>
DEV_INLINE To to_integer(From x) {
    if constexpr (is_same<To, uint64_t>) {
        constexpr From half = From(0x1p63);
        bool high = x >= half;
        uint64_t number = uint64_t(whole<int64_t>(high ? x - half : x));
        return high ? number ^ 0x8000000000000000u : number;
    } else if constexpr (sizeof(To) == 8) {
        return whole<int64_t>(x);
    } else if constexpr (is_same<To, uint32_t> || (is_same<To, uint8_t> && sizeof(From) == 8)) {
        return To(uint64_t(whole<int64_t>(x)));
    } else if constexpr (sizeof(To) < 4) {
        // For numbers out of range, the int32 would be the smallest int32, whose low bits are 0.
        return To(int32_t(abs(x) < From(0x1p31) ? x : From(0)));
    } else {
        return To(whole<int32_t>(x));
    }
}

// -- the representation of floating-point numbers ----------------------------------------------------------------

DEV_INLINE float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
DEV_INLINE double nextafter(double x, double y) { return __builtin_nextafter(x, y); }

// The 16 bits of the neighbour of a half value in the direction of `y`. The bits of consecutive half values of
// one sign are consecutive integers.
DEV_INLINE uint32_t neighbour_bits(uint32_t bits, float x, float y) {
    uint32_t moved = (x < y) == (x > 0.0f) ? bits + 1u : bits - 1u;
    return x == 0.0f ? (y > 0.0f ? 0x0001u : 0x8001u) : moved;
}

DEV_INLINE float nextafter_float16(float x, float y) {
    float a = round_float16(x), b = round_float16(y);
    float next = float16_value(neighbour_bits(float16_bits(a), a, b));
    return a != a || b != b ? a + b : a == b ? b : next;
}

DEV_INLINE float nextafter_bfloat16(float x, float y) {
    float a = round_bfloat16(x), b = round_bfloat16(y);
    float next = bfloat16_value(neighbour_bits(bfloat16_bits(a), a, b));
    return a != a || b != b ? a + b : a == b ? b : next;
}

DEV_INLINE float frexp(float x, int* exponent) { return __builtin_frexpf(x, exponent); }
DEV_INLINE double frexp(double x, int* exponent) { return __builtin_frexp(x, exponent); }

template <typename T>
DEV_INLINE T frexp_mantissa(T x) {
    int exponent = 0;
    return frexp(x, &exponent);
}

// The exponent. It is 0 for infinity and NaN.
template <typename T>
DEV_INLINE int32_t frexp_exponent(T x) {
    int exponent = 0;
    frexp(x, &exponent);
    return abs(x) < infinity<T>() ? exponent : 0;
}

}  // namespace dev
