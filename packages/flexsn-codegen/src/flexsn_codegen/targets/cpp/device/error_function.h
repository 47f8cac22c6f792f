// The error function and the logarithm of the gamma function.
#pragma once

#include "exponential.h"

// Declarations from <math.h>. That header is not included, because only two of its functions are used.
#if defined(__GLIBC__)
extern "C" double lgamma_r(double, int*) noexcept;
extern "C" long double lgammal_r(long double, int*) noexcept;
#elif defined(__APPLE__)
extern "C" double lgamma_r(double, int*);
#endif

namespace dev {

DEV_INLINE float erf(float x) {
    float a = abs(x);
    float square = a * a;
    float p = 7.858035e-05f;
    p = fused(p, square, -0.00080115616f);
    p = fused(p, square, 0.0051885005f);
    p = fused(p, square, -0.026853917f);
    p = fused(p, square, 0.112835884f);
    p = fused(p, square, -0.37612626f);
    p = fused(p, square, 0.12837917f);
    float near = fused(p, a, a);
    // 1 - erfc(a). The logarithm of erfc(a) is approximated by a polynomial. Beyond 4, erfc(a) is less than half of the
    // last bit of the result.
    float t = a > 4.0f ? 4.0f : a;
    float q = 0.00018637879f;
    q = fused(q, t, -0.0029476548f);
    q = fused(q, t, 0.021838052f);
    q = fused(q, t, -0.10310674f);
    q = fused(q, t, -0.63814485f);
    q = fused(q, t, -1.1270891f);
    q = fused(q, t, -0.0003415245f);
    Reduced y = reduced_by_ln2(q);
    float power = power_of_two(y.n);
    float far = 1.0f - fused(power, expm1_near_zero(y.rest), power);
    return copysign(a < 1.0f ? near : far, x);
}

DEV_INLINE float erfc(float x) { return float(__builtin_erfc(double(x))); }

DEV_INLINE double erf(double x) { return __builtin_erf(x); }
DEV_INLINE double erfc(double x) { return double(__builtin_erfcl(static_cast<long double>(x))); }

// With glibc, the result is computed as `long double`, because the errors of glibc's function for double reach 3 ulp.
// With glibc and on Apple systems, `lgamma` itself is not called, because it writes the sign of gamma to a variable
// that all threads share.
DEV_INLINE double lgamma(double x) {
#if defined(__GLIBC__)
    int sign;
    return double(::lgammal_r(x, &sign));
#elif defined(__APPLE__)
    int sign;
    return ::lgamma_r(x, &sign);
#else
    return __builtin_lgamma(x);
#endif
}

DEV_INLINE float lgamma(float x) {
#if defined(__GLIBC__) || defined(__APPLE__)
    int sign;
    return float(::lgamma_r(x, &sign));
#else
    return float(__builtin_lgamma(double(x)));
#endif
}

}  // namespace dev
