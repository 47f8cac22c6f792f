// Special functions, in namespace `dev::special`. They call the functions of torch, so that most results have the
// bits of eager mode on the CPU. They are not part of `device.h`, because torch's header takes long to compile.
#pragma once

#include <ATen/AccumulateType.h>
#include <ATen/NumericUtils.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/MathConstants.h>

#include <cmath>

#include "device/arithmetic.h"

// Torch is compiled with fused multiply-add, so its functions are compiled in this way here, too.
#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
#include <ATen/native/Math.h>
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC pop_options
#endif

namespace dev::special {

#define DEV_OF_ONE(name, function) \
    template <typename T>          \
    static inline T name(T x) {    \
        return function(x);        \
    }

DEV_OF_ONE(bessel_i0, calc_i0)
DEV_OF_ONE(bessel_i0e, calc_i0e)
DEV_OF_ONE(bessel_i1, calc_i1)
DEV_OF_ONE(bessel_i1e, calc_i1e)
DEV_OF_ONE(bessel_j0, bessel_j0_forward)
DEV_OF_ONE(bessel_j1, bessel_j1_forward)
DEV_OF_ONE(bessel_y0, bessel_y0_forward)
DEV_OF_ONE(bessel_y1, bessel_y1_forward)
DEV_OF_ONE(digamma, calc_digamma)
DEV_OF_ONE(erfcx, calc_erfcx)
DEV_OF_ONE(ndtri, calc_ndtri)
DEV_OF_ONE(modified_bessel_i0, modified_bessel_i0_forward)
DEV_OF_ONE(modified_bessel_i1, modified_bessel_i1_forward)
DEV_OF_ONE(modified_bessel_k0, modified_bessel_k0_forward)
DEV_OF_ONE(modified_bessel_k1, modified_bessel_k1_forward)
DEV_OF_ONE(scaled_modified_bessel_k0, scaled_modified_bessel_k0_forward)
DEV_OF_ONE(scaled_modified_bessel_k1, scaled_modified_bessel_k1_forward)
DEV_OF_ONE(spherical_bessel_j0, spherical_bessel_j0_forward)

#undef DEV_OF_ONE

// Near 1, torch's function has few correct digits. Two steps of Halley's method add the missing digits. Above 1/2, they
// use 1 - a and erfc(x), because the difference of these two numbers keeps its digits.
DEV_INLINE double erf_inv(double y) {
    double a = abs(y), x = calc_erfinv(a);
    for (int i = 0; i < 2; ++i) {
        double off = a > 0.5 ? (1.0 - a) - std::erfc(x) : std::erf(x) - a;
        double step = off / (1.1283791670955126 * std::exp(-x * x));
        x = a < 1.0 ? x - step / (1.0 + x * step) : x;
    }
    return copysign(x, y);
}

DEV_INLINE float erf_inv(float y) { return float(erf_inv(double(y))); }

// Orthogonal polynomials. The degree is rounded towards zero.
#define DEV_POLYNOMIAL(name)                                    \
    template <typename T>                                       \
    static inline T name(T x, T degree) {                       \
        return name##_forward(x, to_integer<int64_t>(degree));  \
    }

DEV_POLYNOMIAL(chebyshev_polynomial_t)
DEV_POLYNOMIAL(chebyshev_polynomial_u)
DEV_POLYNOMIAL(chebyshev_polynomial_v)
DEV_POLYNOMIAL(chebyshev_polynomial_w)
DEV_POLYNOMIAL(shifted_chebyshev_polynomial_t)
DEV_POLYNOMIAL(shifted_chebyshev_polynomial_u)
DEV_POLYNOMIAL(shifted_chebyshev_polynomial_v)
DEV_POLYNOMIAL(shifted_chebyshev_polynomial_w)
DEV_POLYNOMIAL(hermite_polynomial_h)
DEV_POLYNOMIAL(hermite_polynomial_he)
DEV_POLYNOMIAL(laguerre_polynomial_l)
DEV_POLYNOMIAL(legendre_polynomial_p)

#undef DEV_POLYNOMIAL

template <typename T>
static inline T zeta(T s, T q) {
    return ::zeta(s, q);
}

template <typename T>
static inline T igamma(T a, T x) {
    return ::calc_igamma(a, x);
}

template <typename T>
static inline T igammac(T a, T x) {
    return ::calc_igammac(a, x);
}

// The derivative of digamma of the given order.
template <typename T>
static inline T polygamma(int order, T x) {
    if (order == 0) {
        return digamma(x);
    }
    return order == 1 ? ::trigamma(x) : ::calc_polygamma(x, order);
}

}  // namespace dev::special
