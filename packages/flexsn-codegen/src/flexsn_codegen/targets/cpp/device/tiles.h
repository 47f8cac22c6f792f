// Transposition of tiles. Only kernels with a transposed operand include this header.
#pragma once

#include "device/types.h"

namespace dev {

// A square block of elements of `size` bytes. Each of its rows is one vector.
template <uint64_t size>
struct Block;

#if defined(__clang__)
#define DEV_SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define DEV_SHUFFLED(x, y, ...) __builtin_shuffle(x, y, vector{__VA_ARGS__})
#endif
#define DEV_BLOCK(number, type, FIRST, SECOND)                                                            \
    template <>                                                                                           \
    struct Block<sizeof(type)> {                                                                          \
        static constexpr int rows = number;                                                               \
        typedef type vector __attribute__((vector_size(number * sizeof(type))));                          \
        /* The first half and the second half of the interleaved elements of two vectors. */              \
        DEV_MEMBER static vector first(vector x, vector y) { return DEV_SHUFFLED(x, y, FIRST); }          \
        DEV_MEMBER static vector second(vector x, vector y) { return DEV_SHUFFLED(x, y, SECOND); }        \
    };
#define DEV_LIST(...) __VA_ARGS__
DEV_BLOCK(
    16, uint8_t, DEV_LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
    DEV_LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
DEV_BLOCK(8, uint16_t, DEV_LIST(0, 8, 1, 9, 2, 10, 3, 11), DEV_LIST(4, 12, 5, 13, 6, 14, 7, 15))
DEV_BLOCK(8, uint32_t, DEV_LIST(0, 8, 1, 9, 2, 10, 3, 11), DEV_LIST(4, 12, 5, 13, 6, 14, 7, 15))
DEV_BLOCK(4, uint64_t, DEV_LIST(0, 4, 1, 5), DEV_LIST(2, 6, 3, 7))
#undef DEV_LIST
#undef DEV_BLOCK
#undef DEV_SHUFFLED

template <typename T>
DEV_INLINE void transpose_block(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    using Own = Block<sizeof(T)>;
    constexpr int rows = Own::rows;
    typename Own::vector now[rows], next[rows];
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) __builtin_memcpy(&now[i], from + i * from_stride, sizeof(now[i]));
    // Each round interleaves the rows of the first half with the rows of the second half.
#pragma GCC unroll 4
    for (int round = 1; round < rows; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < rows / 2; ++i) {
            next[2 * i] = Own::first(now[i], now[rows / 2 + i]);
            next[2 * i + 1] = Own::second(now[i], now[rows / 2 + i]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) now[i] = next[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) __builtin_memcpy(to + i * to_stride, &now[i], sizeof(now[i]));
}

// to[i * to_stride + j] = from[j * from_stride + i] for i < rows, j < columns.
template <typename T>
static inline void transpose(
    const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
    constexpr int64_t step = Block<sizeof(T)>::rows;
    const int64_t whole_rows = rows / step * step, whole_columns = columns / step * step;
    for (int64_t j = 0; j < whole_columns; j += step)
        for (int64_t i = 0; i < whole_rows; i += step)
            transpose_block(from + j * from_stride + i, from_stride, to + i * to_stride + j, to_stride);
    for (int64_t j = 0; j < columns; ++j)
        for (int64_t i = j < whole_columns ? whole_rows : 0; i < rows; ++i)
            to[i * to_stride + j] = from[j * from_stride + i];
}

}  // namespace dev
