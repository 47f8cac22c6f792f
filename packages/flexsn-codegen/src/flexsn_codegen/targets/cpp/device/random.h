// Random numbers by Philox, with the bits that flexsn_graph defines in PyTorch.
#pragma once

#include "arithmetic.h"

namespace dev {

// The word `index` of an element, by Philox 4x32-10 (Salmon et al., 2011).
DEV_INLINE int32_t element_word(int32_t low, int32_t high, int32_t row, int32_t column, int index) {
    uint32_t key_0 = uint32_t(low), key_1 = uint32_t(high);
    uint32_t a = uint32_t(column), b = uint32_t(row), c = 0, d = 0;
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
    return int32_t(index == 0 ? a : index == 1 ? b : c);
}

struct Words {
    uint32_t a, b;
};

// The two words that an even step and the following odd step share, by Philox 2x32-7.
DEV_INLINE Words words(int32_t first, int32_t second, int32_t third, int32_t step, uint32_t stream) {
    uint32_t key = uint32_t(first), a = uint32_t(step >> 1) ^ uint32_t(second), b = uint32_t(third) ^ stream;
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
        uint64_t product = uint64_t(a) * 0xD256D193u;
        a = uint32_t(product >> 32) ^ b ^ key;
        b = uint32_t(product);
        key += 0x9E3779B9u;
    }
    return {a, b};
}

DEV_INLINE float uniform_number(
    int32_t first, int32_t second, int32_t third, int32_t step, uint32_t stream, int bits, float scale) {
    Words w = words(first, second, third, step, stream);
    return float(int32_t((step & 1 ? w.b : w.a) >> (32 - bits))) * scale;
}

// A normal number, from a cosine for even steps and from a sine for odd steps (Box and Muller, 1958).
DEV_INLINE float normal_number(int32_t first, int32_t second, int32_t third, int32_t step, uint32_t stream) {
    Words w = words(first, second, third, step, stream);
    float x = float(int32_t((w.a >> 1) | 1u));
    int32_t bits = int32_t(bits_of(x));
    int32_t exponent = (bits - 0x3F3504F3) >> 23;
    x = from_bits(uint32_t(bits) - (uint32_t(exponent) << 23)) - 1.0f;
    float value = x * 0.2858414053916931f + -0.4411187171936035f;
    value = value * x + 0.508065402507782f;
    value = value * x + -0.6651604771614075f;
    value = value * x + 0.9998043775558472f;
    value = value * x + -2.000009059906006f;
    float square = value * x + float(31 - exponent) * 1.3862943649291992f;
    float half = square * 0.5f;
    float inverse = from_bits(0x5F3759DFu - (bits_of(square) >> 1));
    inverse = inverse * (1.5f - half * inverse * inverse);
    inverse = inverse * (1.500002384185791f - half * inverse * inverse);
    float radius = square * inverse;
    float turn = float(int32_t(w.b - (uint32_t(step & 1) << 30))) * 0x1p-32f;
    float angle = 0.25f - abs(turn);
    float turned = angle * angle;
    float sine = ((turned * -70.9934310913086f + 81.34076690673828f) * turned + -41.33714294433594f) * turned;
    return radius * ((sine + 6.283164024353027f) * angle);
}

}  // namespace dev
