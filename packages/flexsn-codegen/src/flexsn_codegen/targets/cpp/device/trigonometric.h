// sin, cos and tan: of float32 in float64, so that what is left of large arguments has all of its digits.
#pragma once

#include "arithmetic.h"

namespace dev {

// x is `quarters` quarter turns, whose lowest two bits count, and the angle `rest`, in radians.
struct Turned {
    double rest;
    uint64_t quarters;
};

// x * part, which is exact in float64 if `part` has 29 bits, without whole turns.
DEV_INLINE double in_one_turn(double x, double part) {
    double product = x * part;
    return product - round(product);
}

// With as many bits of 1 / (2 pi) as the largest numbers need (Payne and Hanek, Radian reduction for trigonometric
// functions, SIGNUM Newsletter 18, 1983), in parts of 29 bits, and not in a table by the exponent: few processors load
// from many places at once.
DEV_INLINE Turned turned(float number) {
    constexpr double shift = 0x1.8p50;  // of a sum with it, the last bit is a quarter
    double x = double(number);
    double a = in_one_turn(x, 0x1.45f306dp-3);
    double b = in_one_turn(x, 0x1.9391054p-32);
    double c = in_one_turn(x, 0x1.4fe13abp-61);
    double d = in_one_turn(x, 0x1.d1f534dp-90);
    double e = in_one_turn(x, 0x1.b81b6c5p-119);
    double f = x * 0x1.5993c439041fep-150;
    double shifted = ((((a + b) + c) + d) + e) + shift;
    double n = shifted - shift;
    // In this order no partial sum loses a bit that counts: what it is larger by than the rest, its last bit is too.
    double rest = (((((a - n) + b) + c) + d) + e) + f;
    return {rest * 6.283185307179586, bits_of(shifted)};
}

// Of an angle of at most pi / 4, to 2^-37 and 2^-33.
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

DEV_INLINE float sin(float x) {
    float result = float(sine_of(turned(x)));
    return x == 0.0f ? x : result;
}

DEV_INLINE float cos(float x) {
    Turned y = turned(x);
    return float(sine_of({y.rest, y.quarters + 1u}));
}

DEV_INLINE float tan(float x) {
    Turned y = turned(x);
    bool odd = (y.quarters & 1u) != 0;
    double sine = sine_near_zero(y.rest), cosine = cosine_near_zero(y.rest);
    float result = float((odd ? -cosine : sine) / (odd ? sine : cosine));
    return x == 0.0f ? x : result;
}

DEV_INLINE double sin(double x) { return __builtin_sin(x); }
DEV_INLINE double cos(double x) { return __builtin_cos(x); }
DEV_INLINE double tan(double x) { return __builtin_tan(x); }

}  // namespace dev
