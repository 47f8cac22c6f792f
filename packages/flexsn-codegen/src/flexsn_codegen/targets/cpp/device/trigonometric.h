// sin, cos and tan. Only kernels that call these functions include this header, because it takes as long to compile as
// a small kernel.
#pragma once

#include "arithmetic.h"

namespace dev {

// -- float32 functions, computed in float64, so that large arguments are reduced without a loss of digits ---------

// The angle x, as `quarters` quarter turns plus `rest` radians. Only the lowest two bits of `quarters` matter.
struct Turned {
    double rest;
    uint64_t quarters;
};

// x * part without whole turns. The product is exact in float64 if `part` has 29 bits.
DEV_INLINE double in_one_turn(double x, double part) {
    double product = x * part;
    return product - round(product);
}

// Reduces a number by multiples of pi / 2. The factor 1 / (2 pi) has as many bits as the largest numbers need (Payne
// and Hanek, Radian reduction for trigonometric functions, SIGNUM Newsletter 18, 1983). It is a sum of constants of 29
// bits, instead of an entry of a table for each exponent, because few processors load from many addresses at once.
DEV_INLINE Turned turned(float number) {
    constexpr double shift = 0x1.8p50;  // the last bit of a number of this size is worth a quarter
    double x = double(number);
    double a = in_one_turn(x, 0x1.45f306dp-3);
    double b = in_one_turn(x, 0x1.9391054p-32);
    double c = in_one_turn(x, 0x1.4fe13abp-61);
    double d = in_one_turn(x, 0x1.d1f534dp-90);
    double e = in_one_turn(x, 0x1.b81b6c5p-119);
    double f = x * 0x1.5993c439041fep-150;
    double shifted = ((((a + b) + c) + d) + e) + shift;
    double n = shifted - shift;
    // In this order, no partial sum loses a bit that matters.
    double rest = (((((a - n) + b) + c) + d) + e) + f;
    return {rest * 6.283185307179586, bits_of(shifted)};
}

// The sine and the cosine of an angle of at most pi / 4, with errors of 2^-37 and 2^-33.
DEV_INLINE double sine_near_zero(double r) {
    double square = r * r;
    double p = 2.7181141371685606e-06;
    p = fused(p, square, -0.00019839311487856198);
    p = fused(p, square, 0.008333329302424882);
    p = fused(p, square, -0.16666666640776256);
    return fused(p * square, r, r);
}

DEV_INLINE double cosine_near_zero(double r) {
    double square = r * r;
    double p = 2.4433081969478173e-05;
    p = fused(p, square, -0.0013887315609601252);
    p = fused(p, square, 0.041666645669997775);
    return fused(p * square, square, fused(square, -0.5, 1.0));
}

// sin(rest + quarters * pi / 2).
DEV_INLINE double sine_of(Turned y) {
    double value = (y.quarters & 1u) != 0 ? cosine_near_zero(y.rest) : sine_near_zero(y.rest);
    return from_bits(bits_of(value) ^ (y.quarters & 2u) << 62);
}

template <int32_t quarters>
DEV_INLINE float exact_sine(float x) {
    Turned y = turned(x);
    float result = float(sine_of({y.rest, y.quarters + quarters}));
    return quarters == 0 && x == 0.0f ? x : result;
}

DEV_INLINE float tan(float x) {
    Turned y = turned(x);
    bool odd = (y.quarters & 1u) != 0;
    double sine = sine_near_zero(y.rest), cosine = cosine_near_zero(y.rest);
    float result = float((odd ? -cosine : sine) / (odd ? sine : cosine));
    return x == 0.0f ? x : result;
}

// -- float32 functions, computed in vectors of float32 -------------------------------------------------------------
//
// These functions branch if an argument is large. A loop that contains a branch does not become vector code, but it may
// contain calls of functions with the attribute `simd`. GCC replaces such a call by a call of the function's vector
// form, whose symbol follows from the function's name. The definitions below are local symbols of the kernel's library.

#if defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__) && !defined(__clang__)

struct Eight {
    typedef float floats __attribute__((vector_size(32)));
    typedef int32_t ints __attribute__((vector_size(32)));

    DEV_MEMBER static floats fused(floats x, floats y, floats z) { return __builtin_ia32_vfmaddps256(x, y, z); }
    DEV_MEMBER static floats less(floats x, floats y, floats z) { return __builtin_ia32_vfnmaddps256(x, y, z); }
    DEV_MEMBER static bool any_above(floats x, float limit) {
        return __builtin_ia32_movmskps256((floats)(~(x <= limit))) != 0;
    }
    DEV_MEMBER static floats if_odd(ints n, floats x, floats y) {
        return __builtin_ia32_blendvps256(y, x, (floats)(n << 31));
    }
};

#if defined(__AVX512DQ__)
struct Sixteen {
    typedef float floats __attribute__((vector_size(64)));
    typedef int32_t ints __attribute__((vector_size(64)));

    DEV_MEMBER static floats fused(floats x, floats y, floats z) {
        return __builtin_ia32_vfmaddps512_mask(x, y, z, uint16_t(-1), 4);
    }
    DEV_MEMBER static floats less(floats x, floats y, floats z) {
        return __builtin_ia32_vfnmaddps512_mask(x, y, z, uint16_t(-1), 4);
    }
    DEV_MEMBER static bool any_above(floats x, float limit) {
        return __builtin_ia32_cmpps512_mask(x, limit + floats{}, 6, uint16_t(-1), 4) != 0;
    }
    DEV_MEMBER static floats if_odd(ints n, floats x, floats y) {
        return __builtin_ia32_blendmps_512_mask(y, x, __builtin_ia32_cvtd2mask512(n << 31));
    }
};
#endif

template <typename V, int32_t quarters>
static __attribute__((noinline)) typename V::floats exact_sines(typename V::floats x) {
    constexpr int lanes = sizeof(x) / sizeof(float);
    float values[lanes];
    __builtin_memcpy(values, &x, sizeof(x));
    for (int i = 0; i < lanes; ++i) values[i] = exact_sine<quarters>(values[i]);
    __builtin_memcpy(&x, values, sizeof(x));
    return x;
}

// sin(x + quarters * pi / 2). x is reduced by multiples of pi / 2, which is represented as three parts (Cody and
// Waite). For arguments up to 2048, products of n and the second part are exact, because this part has 13 bits.
template <typename V, int32_t quarters>
DEV_INLINE typename V::floats sines(typename V::floats x) {
    using floats = typename V::floats;
    using ints = typename V::ints;
    if (__builtin_expect(V::any_above(x * x, 0x1p22f), 0)) return exact_sines<V, quarters>(x);
    const floats zero = {}, shift = zero + 0x1.8p23f;
    const floats shifted = V::fused(x, zero + 0x1.45f306p-1f, shift);
    const floats n = shifted - shift;
    // The angle is `rest - excess`. Only `rest` and the last sum are rounded. With these signs, sin(-0) is -0.
    const floats first = V::less(n, zero + 0x1.921fb4p0f, x);
    const floats rest = V::less(n, zero + 0x1.444p-24f, first);
    const floats error = V::fused(n, zero + 0x1.444p-24f, rest - first);
    const floats excess = V::fused(n, zero + 0x1.68c234p-39f, error);
    const floats square = rest * rest;
    floats p = V::fused(square, zero + 0x1.993ce2p-13f, zero + -0x1.110726p-7f);
    p = V::fused(p, square, zero + 0x1.555544p-3f);
    const floats sine = rest - V::fused(p * square, rest, excess);
    floats q = V::fused(square, zero + 0x1.99fc26p-16f, zero + -0x1.6c0c76p-10f);
    q = V::fused(q, square, zero + 0x1.55554ap-5f);
    q = V::fused(q, square, zero + -0.5f);
    const floats cosine = V::fused(rest, V::fused(rest, q, excess), zero + 1.0f);
    const ints turns = (ints)shifted + quarters;
    return (floats)((ints)V::if_odd(turns, cosine, sine) ^ (turns >> 1 << 31));
}

#define DEV_VECTORS(name, quarters, symbol, V, result)                                          \
    static result name(result x) __asm__(symbol) __attribute__((used));                         \
    static result name(result x) {                                                              \
        V::floats values = {};                                                                  \
        __builtin_memcpy(&values, &x, sizeof(x));                                               \
        values = sines<V, quarters>(values);                                                    \
        __builtin_memcpy(&x, &values, sizeof(x));                                               \
        return x;                                                                               \
    }
#if defined(__AVX512DQ__)
#define DEV_SIXTEEN(name, quarters) \
    DEV_VECTORS(name##_of_16, quarters, "_ZGVeN16v_flexsn_" #name, Sixteen, Sixteen::floats)
#else
#define DEV_SIXTEEN(name, quarters)
#endif
#define DEV_SINE(name, quarters)                                                                            \
    extern "C" __attribute__((const, nothrow, simd("notinbranch"))) float flexsn_##name(float x);           \
    DEV_VECTORS(name##_of_1, quarters, "flexsn_" #name, Eight, float)                                       \
    DEV_VECTORS(name##_of_4, quarters, "_ZGVbN4v_flexsn_" #name, Eight, Four)                               \
    DEV_VECTORS(name##_of_8, quarters, "_ZGVdN8v_flexsn_" #name, Eight, Eight::floats)                      \
    DEV_SIXTEEN(name, quarters)                                                                             \
    DEV_INLINE float name(float x) { return flexsn_##name(x); }

typedef float Four __attribute__((vector_size(16)));
DEV_SINE(sin, 0)
DEV_SINE(cos, 1)

#undef DEV_SINE
#undef DEV_SIXTEEN
#undef DEV_VECTORS

#else

DEV_INLINE float sin(float x) { return exact_sine<0>(x); }
DEV_INLINE float cos(float x) { return exact_sine<1>(x); }

#endif

DEV_INLINE double sin(double x) { return __builtin_sin(x); }
DEV_INLINE double cos(double x) { return __builtin_cos(x); }
DEV_INLINE double tan(double x) { return __builtin_tan(x); }

}  // namespace dev
