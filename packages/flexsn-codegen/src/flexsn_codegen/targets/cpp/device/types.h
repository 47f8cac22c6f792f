// The representation of floating-point numbers, and the half and float8 types, which only exist in memory.
#pragma once

#include "inline.h"
#include "numbers.h"

namespace dev {

template <typename T>
DEV_INLINE constexpr T nan() {
    return T(__builtin_nanf(""));
}

template <typename T>
DEV_INLINE constexpr T infinity() {
    return T(__builtin_inff());
}

DEV_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DEV_INLINE uint64_t bits_of(double x) { return __builtin_bit_cast(uint64_t, x); }
DEV_INLINE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEV_INLINE double from_bits(uint64_t bits) { return __builtin_bit_cast(double, bits); }

// -- half types, which only exist in memory: computations use float ---------------------------------------------
//
// Conversions use integer operations. Compilers use the processor's conversion instructions only for single numbers,
// and not in vector code.

// The bits of the nearest float16, in the low 16 bits. Ties go to the float16 whose last bit is 0.
DEV_INLINE uint32_t float16_bits(float x) {
    uint32_t bits = bits_of(x);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t size = bits & 0x7FFFFFFFu;
    // The mantissa has 13 fewer bits, and the bias of the exponent is 112 smaller. If a number is rounded up to 2^16,
    // the carry gives the bits of infinity.
    uint32_t normal = (size - 0x38000000u + 0x0FFFu + (size >> 13 & 1u)) >> 13;
    // Below 2^-14, the addition rounds to a multiple of 2^-24, which is in the lowest bits of the sum.
    uint32_t denormal = bits_of(from_bits(size) + 0.5f) - 0x3F000000u;
    uint32_t number = size < 0x38800000u ? denormal : normal;
    number = size >= 0x47800000u ? 0x7C00u : number;
    return sign | (size > 0x7F800000u ? 0x7E00u : number);
}

// The bits of a number that float16 represents exactly. The bias of the exponent is 112 smaller, and the last bits are
// 0.
DEV_INLINE uint32_t exact_float16_bits(float x) {
    uint32_t bits = bits_of(x);
    uint32_t size = bits & 0x7FFFFFFFu;
    uint32_t number = bits_of(from_bits(size) * 0x1p-112f) >> 13;
    number = size < 0x7F800000u ? number : size > 0x7F800000u ? 0x7E00u : 0x7C00u;
    return (bits >> 16 & 0x8000u) | number;
}

DEV_INLINE float float16_value(uint32_t bits) {
    uint32_t size = (bits & 0x7FFFu) << 13;
    float scaled = from_bits(size) * 0x1p112f;
    float number = size >= 0x0F800000u ? from_bits(size | 0x7F800000u) : scaled;
    return from_bits(bits_of(number) | (bits & 0x8000u) << 16);
}

DEV_INLINE uint32_t bfloat16_bits(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

DEV_INLINE float bfloat16_value(uint32_t bits) { return from_bits(bits << 16); }

// -- float8 types, which only exist in memory. Numbers that are too large become NaN (e4m3fn) or infinity (e5m2) -

DEV_INLINE uint32_t float8_e4m3fn_bits(float x) {
    uint32_t bits = bits_of(x);
    uint32_t size = bits & 0x7FFFFFFFu;
    uint32_t normal = (size - (120u << 23) + 0x7FFFFu + (size >> 20 & 1u)) >> 20;
    // The sum is rounded to a multiple of 2^-9, which is in the lowest bits of the sum.
    uint32_t denormal = bits_of(from_bits(size) + 16384.0f) - 0x46800000u;
    uint32_t number = size < 0x3C800000u ? denormal : normal < 0x7Fu ? normal : 0x7Fu;
    return (bits >> 24 & 0x80u) | (size > 0x43F00000u ? 0x7Fu : number);
}

DEV_INLINE float float8_e4m3fn_value(uint32_t bits) {
    uint32_t size = bits & 0x7Fu;
    float normal = from_bits((size << 20) + (120u << 23));
    float number = size < 8u ? float(int32_t(size)) * 0x1p-9f : normal;
    number = size == 0x7Fu ? nan<float>() : number;
    return from_bits(bits_of(number) | (bits & 0x80u) << 24);
}

DEV_INLINE uint32_t float8_e5m2_bits(float x) {
    uint32_t bits = bits_of(x);
    uint32_t size = bits & 0x7FFFFFFFu;
    uint32_t normal = (size - (112u << 23) + 0xFFFFFu + (size >> 21 & 1u)) >> 21;
    uint32_t denormal = bits_of(from_bits(size) + 128.0f) - 0x43000000u;
    uint32_t number = size < 0x38800000u ? denormal : normal < 0x7Cu ? normal : 0x7Cu;
    number = size > 0x47800000u ? 0x7Cu : number;
    return (bits >> 24 & 0x80u) | (size > 0x7F800000u ? 0x7Fu : number);
}

DEV_INLINE float float8_e5m2_value(uint32_t bits) {
    uint32_t size = bits & 0x7Fu;
    float normal = from_bits((size << 21) + (112u << 23));
    float number = size < 4u ? float(int32_t(size)) * 0x1p-16f : normal;
    number = size == 0x7Cu ? infinity<float>() : size > 0x7Cu ? nan<float>() : number;
    return from_bits(bits_of(number) | (bits & 0x80u) << 24);
}

using float16 = narrow<uint16_t, float16_bits, float16_value>;
using bfloat16 = narrow<uint16_t, bfloat16_bits, bfloat16_value>;
using float8_e4m3fn = narrow<uint8_t, float8_e4m3fn_bits, float8_e4m3fn_value>;
using float8_e5m2 = narrow<uint8_t, float8_e5m2_bits, float8_e5m2_value>;

DEV_INLINE float round_float8_e4m3fn(float x) { return float8_e4m3fn_value(float8_e4m3fn_bits(x)); }
DEV_INLINE float round_float8_e4m3fn_saturating(float x) {
    return round_float8_e4m3fn(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
}
DEV_INLINE float round_float8_e5m2(float x) { return float8_e5m2_value(float8_e5m2_bits(x)); }

DEV_INLINE float round_float16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t sign = bits & 0x80000000u;
    uint32_t size = bits & 0x7FFFFFFFu;
    // 2^13 times the power of two of a number is added to the number. The last bit of the sum is then worth as much as
    // the last bit of a float16 of the number's size, so the addition rounds the number to float16. Below 2^-14, the
    // last bit of a float16 is worth 2^-24.
    float power = from_bits((size & 0x7F800000u) + 0x06800000u);
    power = power > 0.5f ? power : 0.5f;
    float number = (from_bits(size) + power) - power;
    uint32_t beyond = size > 0x7F800000u ? size : 0x7F800000u;  // NaN, or infinity
    return from_bits(sign | (number < 65536.0f ? bits_of(number) : beyond));
}

DEV_INLINE float round_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? x : from_bits(rounded);
}

}  // namespace dev
