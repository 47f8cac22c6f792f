// Reductions of rows. Each lane of a block reduces some of the row's elements, and the results of the lanes are
// combined in pairs.
#pragma once

#include "device/arithmetic.h"
#include "device/types.h"

namespace dev {

constexpr int64_t row_lanes = 64;

struct row_sum {
    template <typename T>
    DEV_MEMBER static T first() { return T(0); }
    template <typename T>
    DEV_MEMBER static T both(T a, T b) { return T(a + b); }
};

struct row_max {
    template <typename T>
    DEV_MEMBER static T first() { return -infinity<T>(); }
    template <typename T>
    DEV_MEMBER static T both(T a, T b) { return maximum(a, b); }
};

struct row_min {
    template <typename T>
    DEV_MEMBER static T first() { return infinity<T>(); }
    template <typename T>
    DEV_MEMBER static T both(T a, T b) { return minimum(a, b); }
};

// Memory for the values of a row. A loop over the row stores them, and a later loop reads them.
template <typename T>
struct Row {
    T* values;

    explicit Row(int64_t width) : values(static_cast<T*>(__builtin_malloc(sizeof(T) * (width > 0 ? width : 1)))) {
        if (!values) __builtin_abort();
    }
    Row(const Row&) = delete;
    ~Row() { __builtin_free(values); }
    DEV_MEMBER T& operator[](int64_t lane) { return values[lane]; }
};

template <typename Op, typename T>
struct RowParts {
    T parts[row_lanes];

    DEV_MEMBER RowParts() {
        for (int64_t i = 0; i < row_lanes; ++i) parts[i] = Op::template first<T>();
    }
    DEV_MEMBER void add(int64_t part, T value) { parts[part] = Op::both(parts[part], value); }
    DEV_MEMBER T all() {
        for (int64_t half = row_lanes / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) parts[i] = Op::both(parts[i], parts[half + i]);
        return parts[0];
    }
};

}  // namespace dev
