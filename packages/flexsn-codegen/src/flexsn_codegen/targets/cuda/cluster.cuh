// Thread-block clusters: remote shared memory, barriers that count bytes, and products of matrix fragments.
//
// Instructions and fragment layouts are those of NVIDIA's PTX ISA 8.x: `mapa`, `st.async`, `mbarrier`, `movmatrix`,
// `mma.m16n8k16`. In a product of fragments, the rows of `A` are 16 columns of the step, and the columns of `B` are
// 8 rows of the step.
#pragma once

#include "device.cuh"

namespace dev {

DEV_INLINE uint32_t shared_address(const void* place) { return uint32_t(__cvta_generic_to_shared(place)); }

// Keeps a number in a register. Otherwise, the compiler would compute the number again in every step, from special
// registers, which are slow.
template <typename Number>
DEV_INLINE Number kept(Number x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEV_INLINE uint2 read_two(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

DEV_INLINE uint4 read_four(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// The address of the same shared memory in another block of the cluster.
DEV_INLINE uint32_t remote(uint32_t address, uint32_t block) {
    uint32_t found;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(address), "r"(block));
    return found;
}

DEV_INLINE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEV_INLINE void cluster_synchronize() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// -- barriers that count bytes ---------------------------------------------------------------------------------

DEV_INLINE void barrier_begin(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives at a barrier of a block of the cluster, after this thread's reads. The arrival does not order stores, because
// it would then have to wait for all stores.
DEV_INLINE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEV_INLINE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Sets the number of bytes after whose arrival the barrier's phase ends.
DEV_INLINE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits for the end of a phase. The scope of the wait is the block, because received values are in the block's own
// shared memory. If the scope were the cluster, a thread would also discard values of global memory that it has
// cached, and would wait for its loads in flight.
//
// The blocks of a cluster run at the same time, so each wait ends. If a fault prevents this, the kernel stops with an
// error instead of running forever.
DEV_INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
    for (int i = 0; i < (1 << 24); i++) {
        uint32_t done;
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 1000;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) return;
    }
    __trap();
}

DEV_INLINE void send(uint32_t place, uint32_t barrier, uint32_t a, uint32_t b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(place),
                 "r"(a), "r"(b), "r"(barrier)
                 : "memory");
}

DEV_INLINE void send(uint32_t place, uint32_t barrier, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place),
        "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
        : "memory");
}

// -- numbers of 16 bits ----------------------------------------------------------------------------------------

struct of_bfloat16 {
    static constexpr uint32_t one = 0x3F80u;
    static DEV_MEMBER uint32_t bits(float x, float above) { return bfloat16_bits(x, above); }
    static DEV_MEMBER void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct of_float16 {
    static constexpr uint32_t one = 0x3C00u;
    static DEV_MEMBER uint32_t bits(float x, float above) { return float16_bits(x, above); }
    static DEV_MEMBER void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// A float32 number is the sum of three parts of 16 bits, each with eight bits of the number's significand. Two
// neighbouring numbers are in two words: `first` contains their first parts, which are the upper halves of their bits,
// and `rest` contains the lower halves of their bits. The function computes their other parts.
//
// For infinity and NaN, the sum of all parts is the first part, because the other parts are finite. If there are only
// two parts, the second part is rounded.
template <int parts>
DEV_INLINE void other_parts(uint32_t first, uint32_t rest, uint32_t& second, uint32_t& third) {
    const uint32_t bits[2] = {first << 16, first & 0xFFFF0000u};
    float left[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float x = __uint_as_float(__byte_perm(rest, first, h ? 0x7632 : 0x5410));
        left[h] = fminf(x - __uint_as_float(bits[h]), 0x1p120f);
    }
    if (parts == 2) {
        second = bfloat16_bits(left[0], left[1]);
        return;
    }
    const uint32_t low = __float_as_uint(left[0]), high = __float_as_uint(left[1]);
    second = __byte_perm(low, high, 0x7632);
    third = bfloat16_bits(left[0] - __uint_as_float(low & 0xFFFF0000u), left[1] - __uint_as_float(high & 0xFFFF0000u));
}

// The two words of two neighbouring numbers. NaN is replaced by a NaN that remains NaN without its last bits.
DEV_INLINE uint2 halves(float a, float b) {
    const uint32_t none = 0x7FC00000u;
    const uint32_t low = a == a ? __float_as_uint(a) : none, high = b == b ? __float_as_uint(b) : none;
    return {__byte_perm(low, high, 0x7632), __byte_perm(low, high, 0x5410)};
}

DEV_INLINE uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// -- fragments -------------------------------------------------------------------------------------------------

// Loads the fragment `A` of a matrix: the factors of 16 terms of a product's sums, for 16 columns of the product.
// `down` is the stride between terms, and `across` is the stride between columns. Two numbers of 16 bits are in one
// word, and two float32 numbers are in two words, as in `halves`.
//
// `scattered`: the terms t and t + 4 share a register, as in spikes that are sent as bits. Otherwise, neighbouring
// terms share a register.
template <typename Format, bool scattered, int words, typename Number>
DEV_INLINE void take(uint32_t (&fragment)[words][4], const Number* matrix, int64_t down, int64_t across, int term,
                     int terms, int column, int columns) {
    const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int i = column + g + (r & 1) * 8;
        float pair[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int k = term + (r >> 1) * 8 + (scattered ? q + 4 * h : 2 * q + h);
            pair[h] = i < columns && k < terms ? float(load(matrix[k * down + i * across])) : 0.0f;
        }
        if (words == 1) {
            fragment[0][r] = Format::bits(pair[0], pair[1]);
        } else {
            const uint2 both = halves(pair[0], pair[1]);
            fragment[0][r] = both.x;
            fragment[words - 1][r] = both.y;
        }
    }
}

// The parts of a fragment, in the form in which `multiply` reads them.
template <int parts, int words>
DEV_INLINE void take_apart(uint32_t (&fragment)[parts][4], const uint32_t (&taken)[words][4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        fragment[0][r] = taken[0][r];
        if (words > 1) {
            other_parts<parts>(taken[0][r], taken[words - 1][r], fragment[parts / 2][r], fragment[parts - 1][r]);
        }
    }
}

// Expands spikes of 16 columns and 8 rows from bits to a fragment `B`. Even rows and odd rows have two words each: one
// for the first eight columns, and one for the last eight columns. In each word, bit 4 c + r / 2 is the spike of row r
// and of the word's column c, counted from 0.
template <typename Format>
DEV_INLINE uint2 spread(uint32_t words, int lane) {
    const int g = lane >> 2, q = lane & 3, shift = 4 * q + (g >> 1);
    const uint2 bits = read_two(words + (g & 1) * 8);
    return {(bits.x >> shift & 0x00010001u) * Format::one, (bits.y >> shift & 0x00010001u) * Format::one};
}

}  // namespace dev
