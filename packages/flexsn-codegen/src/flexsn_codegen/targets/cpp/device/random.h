// Random numbers by Philox 4x32-10, to the bit as flexsn_graph defines them in PyTorch.
#pragma once

#include "arithmetic.h"

namespace dev {

struct Words {
    uint32_t a, b, c, d;
};

// The four words of the counter of a number (Salmon et al., 2011).
DEV_INLINE Words words(int32_t low, int32_t high, int32_t step, int32_t row, int32_t column, uint32_t stream) {
    uint32_t key_0 = uint32_t(low), key_1 = uint32_t(high);
    uint32_t a = uint32_t(column >> 2), b = uint32_t(row), c = uint32_t(step), d = stream;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        uint64_t of_a = uint64_t(a) * 0xD2511F53u, of_c = uint64_t(c) * 0xCD9E8D57u;
        a = uint32_t(of_c >> 32) ^ b ^ key_0;
        c = uint32_t(of_a >> 32) ^ d ^ key_1;
        b = uint32_t(of_c);
        d = uint32_t(of_a);
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return {a, b, c, d};
}

// A whole number as the nearest float. By parts, for which compilers have vector code.
DEV_INLINE float float_of(uint32_t word) {
    return float(int32_t(word >> 16)) * 65536.0f + float(int32_t(word & 0xFFFFu));
}

DEV_INLINE float uniform_number(
    int32_t low, int32_t high, int32_t step, int32_t row, int32_t column, uint32_t stream, int bits, float scale) {
    Words w = words(low, high, step, row, column, stream);
    uint32_t first = column & 1 ? w.b : w.a;
    uint32_t second = column & 1 ? w.d : w.c;
    uint32_t word = column & 2 ? second : first;
    return float(int32_t(word >> (32 - bits))) * scale;
}

// Of a number from 2^-33 to 1.
DEV_INLINE float log_of_number(float x) {
    int32_t bits = int32_t(bits_of(x));
    int32_t exponent = (bits - 0x3F3504F3) >> 23;
    x = from_bits(uint32_t(bits) - (uint32_t(exponent) << 23)) - 1.0f;
    float power = float(exponent), square = x * x;
    float value = x * 7.0376836292e-2f - 1.1514610310e-1f;
    value = value * x + 1.1676998740e-1f;
    value = value * x - 1.2420140846e-1f;
    value = value * x + 1.4249322787e-1f;
    value = value * x - 1.6668057665e-1f;
    value = value * x + 2.0000714765e-1f;
    value = value * x - 2.4999993993e-1f;
    value = value * x + 3.3333331174e-1f;
    return power * 0.693359375f + (x + (value * x * square - power * 2.12194440e-4f - square * 0.5f));
}

// By a cosine or a sine of a pair of words (Box and Muller, 1958).
DEV_INLINE float normal_number(
    int32_t low, int32_t high, int32_t step, int32_t row, int32_t column, uint32_t stream) {
    Words w = words(low, high, step, row, column, stream);
    uint32_t length = column & 2 ? w.c : w.a;
    uint32_t turn = column & 2 ? w.d : w.b;
    float radius = sqrt(log_of_number(float_of(length) * 0x1p-32f + 0x1p-33f) * -2.0f);
    uint32_t quarter = (turn + 0x20000000u) >> 30;
    float angle = float(int32_t(turn - (quarter << 30))) * 1.4629180792671596e-09f;
    float square = angle * angle;
    float sine = ((square * -1.9515295891e-4f + 8.3321608736e-3f) * square - 1.6666654611e-1f) * square * angle + angle;
    float cosine = (square * 2.443315711809948e-5f - 1.388731625493765e-3f) * square + 4.166664568298827e-2f;
    cosine = cosine * square * square - square * 0.5f + 1.0f;
    int32_t place = (int32_t(quarter) - (column & 1)) & 3;
    float value = place & 1 ? sine : cosine;
    return radius * (((place + 1) & 2) != 0 ? -value : value);
}

}  // namespace dev
