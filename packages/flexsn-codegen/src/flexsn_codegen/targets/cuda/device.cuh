// The functions that generated sources call. They are in namespace `dev`, and are overloaded for float and double. No
// header of the system is included, because NVRTC has no headers. Its mathematical functions are built in.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

#define DEV_INLINE static __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__

#include "numbers.h"

namespace dev {

// -- representation --------------------------------------------------------------------------------------------

template <typename T>
DEV_INLINE T nan() {
    return T(__int_as_float(0x7FC00000));
}

template <typename T>
DEV_INLINE T infinity() {
    return T(__int_as_float(0x7F800000));
}

// Converts two numbers, with one fast instruction. A conversion of one number would run on a slower unit of the GPU.
DEV_INLINE uint32_t bfloat16_bits(float x, float above) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(above), "f"(x));
    return bits;
}
DEV_INLINE uint32_t bfloat16_bits(float x) { return bfloat16_bits(x, 0.0f); }

DEV_INLINE float bfloat16_value(uint32_t bits) { return __uint_as_float(bits << 16); }

DEV_INLINE uint32_t float16_bits(float x, float above) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(above), "f"(x));
    return bits;
}
DEV_INLINE uint32_t float16_bits(float x) { return float16_bits(x, 0.0f); }

DEV_INLINE float float16_value(uint32_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16_t(bits)));
    return x;
}

using float16 = narrow<uint16_t, float16_bits, float16_value>;
using bfloat16 = narrow<uint16_t, bfloat16_bits, bfloat16_value>;

DEV_INLINE float round_float16(float x) { return float16_value(float16_bits(x)); }
DEV_INLINE float round_bfloat16(float x) { return __uint_as_float(bfloat16_bits(0.0f, x)); }

// -- arithmetic ------------------------------------------------------------------------------------------------

#define DEV_BOTH(name, of_float, of_double)                       \
    DEV_INLINE float name(float x) { return ::of_float(x); }      \
    DEV_INLINE double name(double x) { return ::of_double(x); }

DEV_BOTH(sqrt, sqrtf, sqrt)
DEV_BOTH(floor, floorf, floor)
DEV_BOTH(ceil, ceilf, ceil)
DEV_BOTH(trunc, truncf, trunc)
DEV_BOTH(round, rintf, rint)  // ties go to even
DEV_BOTH(acos, acosf, acos)
DEV_BOTH(acosh, acoshf, acosh)
DEV_BOTH(asin, asinf, asin)
DEV_BOTH(asinh, asinhf, asinh)
DEV_BOTH(atan, atanf, atan)
DEV_BOTH(atanh, atanhf, atanh)
DEV_BOTH(cos, cosf, cos)
DEV_BOTH(cosh, coshf, cosh)
DEV_BOTH(sin, sinf, sin)
DEV_BOTH(sinh, sinhf, sinh)
DEV_BOTH(tan, tanf, tan)
DEV_BOTH(tanh, tanhf, tanh)
DEV_BOTH(erf, erff, erf)
DEV_BOTH(erfc, erfcf, erfc)
DEV_BOTH(exp, expf, exp)
DEV_BOTH(exp2, exp2f, exp2)
DEV_BOTH(expm1, expm1f, expm1)
DEV_BOTH(lgamma, lgammaf, lgamma)
DEV_BOTH(log, logf, log)
DEV_BOTH(log10, log10f, log10)
DEV_BOTH(log1p, log1pf, log1p)
DEV_BOTH(log2, log2f, log2)

#undef DEV_BOTH

DEV_INLINE float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
DEV_INLINE double rsqrt(double x) { return 1.0 / ::sqrt(x); }
DEV_INLINE float pow(float x, float y) { return ::powf(x, y); }
DEV_INLINE double pow(double x, double y) { return ::pow(x, y); }

DEV_INLINE float atan2(float x, float y) { return ::atan2f(x, y); }
DEV_INLINE double atan2(double x, double y) { return ::atan2(x, y); }
DEV_INLINE float hypot(float x, float y) { return ::hypotf(x, y); }
DEV_INLINE double hypot(double x, double y) { return ::hypot(x, y); }
DEV_INLINE float fmod(float x, float y) { return ::fmodf(x, y); }
DEV_INLINE double fmod(double x, double y) { return ::fmod(x, y); }
DEV_INLINE float nextafter(float x, float y) { return ::nextafterf(x, y); }
DEV_INLINE double nextafter(double x, double y) { return ::nextafter(x, y); }
DEV_INLINE bool signbit(float x) { return __float_as_uint(x) >> 31 != 0; }
DEV_INLINE bool signbit(double x) { return __double_as_longlong(x) < 0; }

DEV_INLINE float abs(float x) { return ::fabsf(x); }
DEV_INLINE double abs(double x) { return ::fabs(x); }

// The remainder with the sign of `y`.
template <typename T>
DEV_INLINE T remainder(T x, T y) {
    T rest = fmod(x, y);
    return rest != T(0) && (y < T(0)) != (rest < T(0)) ? rest + y : rest;
}

// Rounds towards zero, as conversions of the GPU do.
template <typename To, typename From>
DEV_INLINE To to_integer(From x) {
    return To(int64_t(x));
}

template <typename T>
DEV_INLINE T frexp_mantissa(T x) {
    int exponent = 0;
    return ::frexp(x, &exponent);
}

template <typename T>
DEV_INLINE int32_t frexp_exponent(T x) {
    int exponent = 0;
    ::frexp(x, &exponent);
    return abs(x) < infinity<T>() ? exponent : 0;
}

}  // namespace dev
