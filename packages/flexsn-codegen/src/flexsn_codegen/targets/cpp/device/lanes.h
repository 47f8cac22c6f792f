// Functions for loops over lanes: loads and stores, conditions, offsets, and reductions of a block.
#pragma once

#if __has_include(<omp.h>)
#include <omp.h>
#endif

#include "device/types.h"

// Precedes a loop over lanes that may become vector code: no lane reads memory that another lane writes.
#if defined(__clang__)
#define DEV_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define DEV_LANES _Pragma("GCC ivdep")
#endif

// Marks a kernel that computes so much for each element that vectors of 512 bits are faster. By default, GCC does not
// use such vectors. In a kernel that waits for memory, they are slower. Processors without VBMI2 lower their clock
// frequency while they use them.
#if defined(__AVX512VBMI2__) && !defined(__clang__)
#define DEV_512
#define DEV_WIDE __attribute__((target("prefer-vector-width=512")))
#else
#define DEV_WIDE
#endif

// The library's function that Python calls. Its argument points to `number` integers.
#define DEV_ENTRY(number)                                                                    \
    extern "C" __attribute__((visibility("default"))) const int64_t count = number;          \
    extern "C" __attribute__((visibility("default"))) void run(const int64_t* arguments)

namespace dev {

// Declared, but not defined. `decltype(dev::value(x))` is the type of a copy of `x`.
template <typename T>
T value(const T& x);

// Stores a value. A half value is already rounded, so it is converted without the operations that round.
template <typename T, typename V>
static inline void store_rounded(T& place, V value) { store(place, value); }
static inline void store_rounded(float16& place, float value) { place.bits = uint16_t(exact_float16_bits(value)); }
static inline void store_rounded(bfloat16& place, float value) {
    place.bits = uint16_t(value != value ? 0x7FC0u : bits_of(value) >> 16);
}

// Vectors of float for kernels of float16. They are converted by instructions of the processor that GCC does not use in
// loops.
#if defined(__GNUC__) && !defined(__clang__) && defined(__F16C__)
#if defined(__AVX512F__)
constexpr int64_t float16_lanes = 16;
#else
constexpr int64_t float16_lanes = 8;
#endif
typedef float floats __attribute__((vector_size(4 * float16_lanes)));
typedef int16_t float16s __attribute__((vector_size(2 * float16_lanes)));

DEV_INLINE floats float16_values(float16s bits) {
#if defined(__AVX512F__)
    return (floats)__builtin_ia32_vcvtph2ps512_mask(bits, floats{}, int16_t(-1), 4);
#else
    return (floats)__builtin_ia32_vcvtph2ps256(bits);
#endif
}

DEV_INLINE float16s nearest_float16s(floats values) {
#if defined(__AVX512F__)
    return (float16s)__builtin_ia32_vcvtps2ph512_mask(values, 0, float16s{}, int16_t(-1));
#else
    return (float16s)__builtin_ia32_vcvtps2ph256(values, 0);
#endif
}

DEV_INLINE floats round_float16(floats values) { return float16_values(nearest_float16s(values)); }
DEV_INLINE floats same(float value) { return value - floats{}; }

DEV_INLINE floats load_floats(const float* place) {
    floats values;
    __builtin_memcpy(&values, place, sizeof(values));
    return values;
}
DEV_INLINE floats load_floats(const float16* place) {
    float16s bits;
    __builtin_memcpy(&bits, place, sizeof(bits));
    return float16_values(bits);
}
DEV_INLINE void store_floats(float* place, floats values) { __builtin_memcpy(place, &values, sizeof(values)); }
DEV_INLINE void store_floats(float16* place, floats values) {
    const float16s bits = nearest_float16s(values);
    __builtin_memcpy(place, &bits, sizeof(bits));
}

// True if the elements of all tensors are float16 or float.
template <typename... Types>
constexpr bool in_floats = ((is_same<Types, float16> || is_same<Types, float>) && ...);
#else
constexpr int64_t float16_lanes = 1;
template <typename... Types>
constexpr bool in_floats = false;
#endif

// The zeros that are loaded for steps that do not exist.
template <typename T, int64_t count>
static const T zeros[count] = {};

// Decodes a number from the bits in the arguments. For bools and integers of less than 64 bits, `low` is the value.
template <typename T>
static inline T number(int64_t low, int64_t high = 0) {
    if constexpr (is_same<T, bool>) {
        return low != 0;
    } else if constexpr (is_integer<T> && sizeof(T) < 8) {
        return T(low);
    } else {
        const uint64_t wide = uint64_t(uint32_t(low)) | uint64_t(uint32_t(high)) << 32;
        const uint32_t narrow = uint32_t(low);
        T value;
        if constexpr (sizeof(T) == 8) __builtin_memcpy(&value, &wide, sizeof(T));
        else __builtin_memcpy(&value, &narrow, sizeof(T));
        return value;
    }
}

// The type of the conditions that loops over lanes read, in kernels with tensors of `Types`. GCC computes as many lanes
// at a time as a vector has elements of the narrowest type. With `narrow_t`, GCC computes 32 lanes of float at a
// time, so that the waiting times of dependent operations overlap. For double, and for float16, whose conversions are
// long, there are not enough registers for 32 lanes, so the type is wider.
#if defined(DEV_512)
using narrow_t = int16_t;
#else
using narrow_t = int8_t;
#endif
template <typename... Types>
using condition_t = choice_t<
    ((sizeof(Types) > 4) || ...), int32_t,
    choice_t<(is_same<Types, float16> || ...), int16_t, narrow_t>>;

template <typename T, int64_t count>
struct Conditions {
    T values[2 * count];

    constexpr Conditions() : values() {
        for (int64_t i = count; i < 2 * count; ++i) values[i] = 1;
    }
    const T* all(bool condition) const { return values + (condition ? count : 0); }
};

// A condition that is the same for all lanes is read as `conditions<T, BLOCK>.all(...)[lane]`. A loop that reads the
// condition itself does not become vector code.
template <typename T, int64_t count>
static constexpr Conditions<T, count> conditions;

// Adds `i / inner % size * stride` to the offset of each element `i` of a block. This takes a few divisions for the
// block instead of two for each element.
static inline void add_offsets(
    int64_t* offsets, int64_t begin, int64_t lanes, int64_t inner, int64_t size, int64_t stride) {
    const int64_t end = size * stride;
    int64_t rest = begin % inner, offset = begin / inner % size * stride;
    if (stride == 0) return;
    if (inner == 1) {  // each element has another offset, so the loop handles up to `size` elements at a time
        for (int64_t lane = 0; lane < lanes; offset = 0) {
            const int64_t count = (end - offset) / stride;
            const int64_t next = lane + count < lanes ? lane + count : lanes;
            for (int64_t first = lane; lane < next; ++lane) offsets[lane] += offset + (lane - first) * stride;
        }
        return;
    }
    for (int64_t lane = 0; lane < lanes;) {
        const int64_t next = lane + inner - rest < lanes ? lane + inner - rest : lanes;
        for (; lane < next; ++lane) offsets[lane] += offset;
        rest = 0;
        offset = offset + stride == end ? 0 : offset + stride;
    }
}

// A dimension of an operand.
struct Dimension {
    int64_t size, stride;
};

// Walks the elements of an operand row by row, in the order in which a kernel counts elements. The size of the
// outermost dimension is not used.
template <int dimensions>
struct Rows {
    Dimension of[dimensions];
    int64_t index[dimensions] = {};
    int64_t row = 0;

    Rows(const Dimension (&all)[dimensions], int64_t begin) {
        for (int d = dimensions - 1; d >= 0; --d) {
            of[d] = all[d];
            index[d] = d > 0 ? begin % of[d].size : begin;
            begin = d > 0 ? begin / of[d].size : 0;
            if (d < dimensions - 1) row += index[d] * of[d].stride;
        }
    }

    void next() {
        for (int d = dimensions - 2; d >= 0; --d) {
            row += of[d].stride;
            if (d == 0 || ++index[d] < of[d].size) return;
            row -= of[d].size * of[d].stride;
            index[d] = 0;
        }
    }

    // For the next `lanes` elements, calls `move(lane, offset, count)` for each run of elements in one row.
    template <typename Move>
    void each(int64_t lanes, Move move) {
        const int64_t size = of[dimensions - 1].size, stride = of[dimensions - 1].stride;
        int64_t column = index[dimensions - 1];
        for (int64_t lane = 0; lane < lanes;) {
            const int64_t count = size - column < lanes - lane ? size - column : lanes - lane;
            move(lane, row + column * stride, count);
            lane += count;
            column += count;
            if (column == size) {
                column = 0;
                next();
            }
        }
        index[dimensions - 1] = column;
    }

    template <typename T>
    void gather(const T* from, T* to, int64_t lanes) {
        const int64_t size = of[dimensions - 1].size, stride = of[dimensions - 1].stride;
        if (dimensions == 2 && of[0].stride == 0 && size < lanes) {  // all rows are one row, which is copied
            int64_t column = index[dimensions - 1];
            for (int64_t i = 0; i < size; ++i) {
                to[i] = from[column * stride];
                column = column + 1 == size ? 0 : column + 1;
            }
            for (int64_t done = size; done < lanes; done *= 2)
                __builtin_memcpy(to + done, to, sizeof(T) * uint64_t(done < lanes - done ? done : lanes - done));
            index[dimensions - 1] = (index[dimensions - 1] + lanes) % size;
            return;
        }
        each(lanes, [=](int64_t lane, int64_t offset, int64_t count) {
            for (int64_t i = 0; i < count; ++i) to[lane + i] = from[offset + i * stride];
        });
    }

    template <typename T>
    void scatter(const T* from, T* to, int64_t lanes) {
        const int64_t stride = of[dimensions - 1].stride;
        each(lanes, [=](int64_t lane, int64_t offset, int64_t count) {
            for (int64_t i = 0; i < count; ++i) to[offset + i * stride] = from[lane + i];
        });
    }
};

// The number of threads for a kernel's programs. A thread needs at least `fewest` elements, counted over all steps,
// because computing fewer elements takes less time than waking a thread.
static inline int64_t team(int64_t most, int64_t programs, int64_t elements) {
    constexpr int64_t fewest = 1 << 14;
#if defined(_OPENMP) && __has_include(<omp.h>)
    most = most > 0 ? most : omp_get_max_threads();
#endif
    const int64_t busy = elements / fewest < programs ? elements / fewest : programs;
    return busy < 2 || most < 2 ? 1 : busy < most ? busy : most;
}

// The sum over the lanes of a block. It is computed in pairs, so that its error grows with the logarithm of `count`,
// and in an order that only depends on `count`. The array `values` is overwritten.
template <typename T>
static inline T sum(T* values, int64_t count) {
    while (count > 1) {
        const int64_t half = count / 2;
        const int64_t first = count - half;
        DEV_LANES
        for (int64_t i = 0; i < half; ++i) values[i] = T(values[i] + values[first + i]);
        count = first;
    }
    return count == 1 ? values[0] : T(0);
}

// 1 if two values differ in any bit, otherwise 0.
template <typename T>
static inline int32_t differ(T a, T b) {
    if constexpr (is_integer<T>) {
        return a != b;
    } else {
        choice_t<sizeof(T) == 8, uint64_t, uint32_t> x, y;
        static_assert(sizeof(T) == sizeof(x));
        __builtin_memcpy(&x, &a, sizeof(T));
        __builtin_memcpy(&y, &b, sizeof(T));
        return x != y;
    }
}

static inline int64_t any(const int32_t* flags, int64_t lanes) {
    int32_t found = 0;
    for (int64_t lane = 0; lane < lanes; ++lane) found |= flags[lane];
    return found != 0;
}

// The smallest and the largest value of a block, clamped to [0, most].
static inline int64_t least(const int32_t* values, int64_t lanes, int64_t most) {
    int64_t found = most;
    for (int64_t lane = 0; lane < lanes; ++lane) found = values[lane] < found ? values[lane] : found;
    return found < 0 ? 0 : found;
}

static inline int64_t largest(const int32_t* values, int64_t lanes, int64_t most) {
    int64_t found = 0;
    for (int64_t lane = 0; lane < lanes; ++lane) found = values[lane] > found ? values[lane] : found;
    return found > most ? most : found;
}

// Stores a block's flags, which are 0 or 1, as bits. The last word of 32 bits is padded with zeros.
static inline void store_bits(uint8_t* bytes, const uint8_t* flags, int64_t lanes) {
    for (int64_t first = 0; first < lanes; first += 8) {
        uint8_t byte = 0;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        if (first + 8 <= lanes) {
            uint64_t eight;
            __builtin_memcpy(&eight, flags + first, 8);
            bytes[first / 8] = uint8_t(eight * 0x0102040810204080u >> 56);  // moves flag k to bit 56 + k
            continue;
        }
#endif
        for (int64_t i = first; i < lanes && i < first + 8; ++i) byte |= uint8_t(flags[i] << (i - first));
        bytes[first / 8] = byte;
    }
    for (int64_t i = (lanes + 7) / 8; i % 4 != 0; ++i) bytes[i] = 0;
}

}  // namespace dev
