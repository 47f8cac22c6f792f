// Functions of numbers of any type, for kernels in C++ and in CUDA C++. They only use operators of C++, and no header.
//
// Operations on integers never trap. Eager mode on the CPU raises an error for a division by 0. Here, n / 0 is n and
// n % 0 is 0, as in Triton kernels. The smallest number divided by -1 is itself, and the remainder is 0.
//
// `DEV_INLINE`, `DEV_MEMBER` and the integer types have to be defined before this header.
#pragma once

namespace dev {

// -- types -----------------------------------------------------------------------------------------------------

template <typename First, typename Second>
constexpr bool is_same = false;

template <typename T>
constexpr bool is_same<T, T> = true;

template <typename T>
constexpr bool is_signed = T(-1) < T(0);

template <typename T>
constexpr bool is_integer = T(1) / T(2) == T(0);

template <bool condition, typename First, typename Second>
struct choice {
    using type = First;
};

template <typename First, typename Second>
struct choice<false, First, Second> {
    using type = Second;
};

// The first type if the condition is true, otherwise the second type.
template <bool condition, typename First, typename Second>
using choice_t = typename choice<condition, First, Second>::type;

// -- several results of one step -------------------------------------------------------------------------------

template <typename... Types>
struct tuple;

template <typename First>
struct tuple<First> {
    First first;
};

template <typename First, typename... Rest>
struct tuple<First, Rest...> {
    First first;
    tuple<Rest...> rest;
};

template <typename First>
DEV_INLINE tuple<First> make_tuple(First first) {
    return {first};
}

template <typename First, typename Second, typename... Rest>
DEV_INLINE tuple<First, Second, Rest...> make_tuple(First first, Second second, Rest... rest) {
    return {first, make_tuple(second, rest...)};
}

template <int index, typename Tuple>
DEV_INLINE auto get(const Tuple& tuple) {
    if constexpr (index == 0) {
        return tuple.first;
    } else {
        return get<index - 1>(tuple.rest);
    }
}

// -- memory ----------------------------------------------------------------------------------------------------

// A type that only exists in memory. Computations use float.
template <typename Bits, uint32_t (*to_bits)(float), float (*to_float)(uint32_t)>
struct narrow {
    Bits bits;

    narrow() = default;
    DEV_MEMBER explicit narrow(float x) : bits(Bits(to_bits(x))) {}
    DEV_MEMBER explicit operator float() const { return to_float(bits); }
};

template <typename T>
DEV_INLINE T load(const T& place) { return place; }
template <typename Bits, uint32_t (*to_bits)(float), float (*to_float)(uint32_t)>
DEV_INLINE float load(const narrow<Bits, to_bits, to_float>& place) { return float(place); }

template <typename T, typename V>
DEV_INLINE void store(T& place, V value) { place = T(value); }

// -- signs -----------------------------------------------------------------------------------------------------

template <typename T>
DEV_INLINE T abs(T x) {
    if constexpr (is_signed<T>) {
        return T(x < T(0) ? -x : x);
    } else {
        return x;
    }
}

template <typename T>
DEV_INLINE T sign(T x) {
    if constexpr (is_signed<T>) {
        return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);
    } else {
        return T(x != T(0));
    }
}

// -- maxima and minima -----------------------------------------------------------------------------------------

// The result is NaN if `x` or `y` is NaN.
template <typename T>
DEV_INLINE T maximum(T x, T y) {
    T larger = x > y ? x : y;
    return x != x ? x : larger;
}

template <typename T>
DEV_INLINE T minimum(T x, T y) {
    T smaller = x < y ? x : y;
    return x != x ? x : smaller;
}

// If one operand is NaN, the result is the other operand.
template <typename T>
DEV_INLINE T fmax(T x, T y) {
    T larger = x > y ? x : y;
    return y != y ? x : larger;
}

template <typename T>
DEV_INLINE T fmin(T x, T y) {
    T smaller = x < y ? x : y;
    return y != y ? x : smaller;
}

// -- integers --------------------------------------------------------------------------------------------------

template <typename T>
DEV_INLINE bool is_minus_one(T x) {
    return is_signed<T> && x == T(-1);
}

// The divisor, or 1 if a division by it may trap.
template <typename T>
DEV_INLINE T divisor(T y) {
    return y == T(0) || is_minus_one(y) ? T(1) : y;
}

// The quotient, rounded towards zero.
template <typename T>
DEV_INLINE T int_div(T x, T y) {
    return is_minus_one(y) ? T(T(0) - x) : T(x / divisor(y));
}

// The remainder with the sign of `x`.
template <typename T>
DEV_INLINE T int_fmod(T x, T y) {
    return T(x % divisor(y));
}

// The remainder with the sign of `y`.
template <typename T>
DEV_INLINE T int_remainder(T x, T y) {
    T rest = int_fmod(x, y);
    if constexpr (is_signed<T>) {
        // The sum does not overflow, because `rest` and `y` have different signs. If `y` is 0, `rest` is 0.
        return rest != T(0) && (y < T(0)) != (rest < T(0)) ? T(rest + y) : rest;
    } else {
        return rest;
    }
}

// An unsigned type of the same size, but of at least 32 bits, because C++ multiplies narrower types as int, which can
// overflow.
template <typename T>
using wrapping = choice_t<sizeof(T) == 8, uint64_t, uint32_t>;

// Computes a power by squaring. For a negative exponent, only powers of 1 and -1 are integers. All other powers are 0.
template <typename T>
DEV_INLINE T int_pow(T x, T y) {
    bool negative = y < T(1) && y != T(0);
    bool has_inverse = x == T(1) || is_minus_one(x);
    wrapping<T> power = wrapping<T>(x), result = 1;
    wrapping<T> exponent = wrapping<T>(negative ? T(y & T(1)) : y);
    while (exponent != 0) {
        result = (exponent & 1u) != 0 ? wrapping<T>(result * power) : result;
        power = wrapping<T>(power * power);
        exponent = wrapping<T>(exponent >> 1);
    }
    return negative && !has_inverse ? T(0) : T(result);
}

// Integer powers of floating-point numbers, computed in float64.
template <int n>
DEV_INLINE double wide_power(double x) {
    if constexpr (n == 1) {
        return x;
    } else {
        const double half = wide_power<n / 2>(x);
        return n % 2 ? half * half * x : half * half;
    }
}

template <int n>
DEV_INLINE float power(float x) { return float(wide_power<n>(double(x))); }

template <int n>
DEV_INLINE float inverse_power(float x) { return float(1.0 / wide_power<n>(double(x))); }

template <typename T>
DEV_INLINE T gcd(T x, T y) {
    T a = abs(x), b = abs(y);
    while (b != T(0)) {
        T rest = int_fmod(a, b);
        a = b;
        b = rest;
    }
    return abs(a);
}

// 0 if all bits of `x` are shifted out, or if `y` is negative.
template <typename T>
DEV_INLINE T shift_left(T x, T y) {
    constexpr T bits = T(8 * sizeof(T));
    bool inside = y < bits && !(y < T(1) && y != T(0));
    return inside ? T(wrapping<T>(x) << (inside ? y : T(0))) : T(0);
}

// If `y` is too large or negative, the result is 0, or -1 for negative `x`.
template <typename T>
DEV_INLINE T shift_right(T x, T y) {
    constexpr T bits = T(8 * sizeof(T));
    bool inside = y < bits && !(y < T(1) && y != T(0));
    if constexpr (is_signed<T>) {
        return T(x >> (inside ? y : T(bits - 1)));
    } else {
        return inside ? T(x >> (inside ? y : T(0))) : T(0);
    }
}

}  // namespace dev
