"""Functions that call the base functions. Tests in the interpreter run the same code of these functions as a GPU.

Functions of integers return the results of eager mode on CUDA if these are defined, and never trap. All elements of a
block run the same iterations of a loop. The number of iterations is a constant, or the largest number that an element
needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device import _base as base

# -- integers ----------------------------------------------------------------------------------------------


@triton.jit
def _divisor(y):
    # For a divisor of 0, eager mode raises an error on the CPU, and its result is undefined on CUDA. Here, n / 0 is n,
    # and n % 0 is 0.
    return tl.where(y == 0, tl.full([], 1, y.dtype), y)


@triton.jit
def int_div(x, y):
    """Divides integers, and rounds the quotient towards zero."""
    return x // _divisor(y)


@triton.jit
def int_fmod(x, y):
    """The remainder with the sign of `x`."""
    return x % _divisor(y)


@triton.jit
def int_remainder(x, y):
    """The remainder with the sign of `y`."""
    y = _divisor(y)
    mod = x % y
    return tl.where((mod != 0) & ((mod < 0) != (y < 0)), mod + y, mod)


@triton.jit
def int_pow(x, y):
    """A power, by squaring. For a negative exponent, only powers of 1 and -1 are integers. Other powers become 0."""
    one = tl.full([], 1, x.dtype)
    zero = tl.full([], 0, x.dtype)
    result = tl.where(y < 0, tl.where((x == one) | (x + one == zero), one, zero), one)
    power = x
    exponent = tl.where(y < 0, y & one, y)
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((exponent & one) != 0, result * power, result)
        power = power * power
        exponent = exponent >> one
    return result


@triton.jit
def gcd(x, y):
    x = tl.abs(x)
    y = tl.abs(y)
    for _ in range(93):  # the largest number of steps of Euclid's algorithm on two int64 numbers
        rest = int_fmod(x, y)
        x = tl.where(y == 0, x, y)
        y = rest
    return tl.abs(x)


@triton.jit
def shift_left(x, y, bits: tl.constexpr):
    inside = (y >= 0) & (y < bits)
    return tl.where(inside, x << tl.where(inside, y, 0), tl.full([], 0, x.dtype))


@triton.jit
def shift_right(x, y, last: tl.constexpr):
    """Shifts `x` right by `y`, or by `last`, the index of the highest bit, if `y` is negative or above `last`."""
    inside = (y >= 0) & (y <= last)
    return x >> tl.where(inside, y, tl.full([], last, x.dtype))


# -- the representation of floating-point numbers ------------------------------------------------------------


@triton.jit
def nextafter_float16(x, y):
    """For each float16 value `x`, the next float16 value towards `y`. All values are in float32 registers."""
    x, y = base.round_float16(x), base.round_float16(y)
    bits = x.to(tl.float16).to(tl.int16, bitcast=True)
    one = tl.full([], 1, tl.int16)
    moved = tl.where((x < y) == (x > 0), bits + one, bits - one)
    nudged = tl.where(y > 0, one, one | tl.full([], -32768, tl.int16))
    bits = tl.where(x == 0, nudged, moved)
    result = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((x != x) | (y != y), x + y, tl.where(x == y, y, result))


@triton.jit
def nextafter_bfloat16(x, y):
    """For each bfloat16 value `x`, the next bfloat16 value towards `y`. A bfloat16 is the upper half of a float32."""
    x, y = base.round_bfloat16(x), base.round_bfloat16(y)
    bits = x.to(tl.int32, bitcast=True)
    one = tl.full([], 65536, tl.int32)
    moved = tl.where((x < y) == (x > 0), bits + one, bits - one)
    nudged = tl.where(y > 0, one, one | tl.full([], -2147483648, tl.int32))
    result = tl.where(x == 0, nudged, moved).to(tl.float32, bitcast=True)
    return tl.where((x != x) | (y != y), x + y, tl.where(x == y, y, result))


@triton.jit
def _normal(x):
    """`x` and 0, or, if `x` is denormal, `x` multiplied by a power of two and the exponent of this power."""
    if x.dtype == tl.float64:
        small = tl.abs(x) < tl.full([], 2.2250738585072014e-308, tl.float64)
        return tl.where(small, x * tl.full([], 18014398509481984.0, tl.float64), x), tl.where(small, 54, 0)
    else:
        small = tl.abs(x) < tl.full([], 1.1754943508222875e-38, tl.float32)
        return tl.where(small, x * tl.full([], 33554432.0, tl.float32), x), tl.where(small, 25, 0)


@triton.jit
def frexp_mantissa(x):
    y, _ = _normal(x)
    if x.dtype == tl.float64:
        bits = y.to(tl.int64, bitcast=True)
        bits = (bits & tl.full([], -9218868437227405313, tl.int64)) | tl.full([], 0x3FE0000000000000, tl.int64)
        mantissa = bits.to(tl.float64, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits & tl.full([], -2139095041, tl.int32)) | tl.full([], 0x3F000000, tl.int32)
        mantissa = bits.to(tl.float32, bitcast=True)
    return tl.where((x == 0) | (x - x != 0), x, mantissa)


@triton.jit
def frexp_exponent(x):
    y, scale = _normal(x)
    if x.dtype == tl.float64:
        exponent = ((y.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    else:
        exponent = ((y.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    exponent = exponent.to(tl.int32) - scale
    return tl.where((x == 0) | (x - x != 0), 0, exponent).to(tl.int32)


# -- special functions ---------------------------------------------------------------------------------------


@triton.jit
def _number(value: tl.constexpr, x):
    return tl.full([], value, x.dtype)


@triton.jit
def digamma(x):
    """Digamma by reflection to x > 0, recurrence to x >= 10, and an asymptotic series (DLMF 5.5.4, 5.5.2, 5.11.2)."""
    one = _number(1.0, x)
    pi = tl.full([], 3.141592653589793, tl.float64)
    pole = (x < 0) & (base.trunc(x) == x)
    negative = x < 0
    # The reflected term is computed in float64, because digamma is a small difference of two terms near its zeros.
    fraction = (x - base.trunc(x)).to(tl.float64)
    reflected = (pi / base.tan(pi * fraction)).to(x.dtype)
    z = tl.where(negative, one - x, x)
    shift = tl.zeros_like(z)
    for _ in range(10):
        shift = tl.where(z < 10, shift - base.div(one, z), shift)
        z = tl.where(z < 10, z + one, z)
    square = base.div(one, z * z)
    series = _number(0.08333333333333333, x)
    series = _number(-0.021092796092796094, x) + series * square
    series = _number(0.007575757575757576, x) + series * square
    series = _number(-0.004166666666666667, x) + series * square
    series = _number(0.003968253968253968, x) + series * square
    series = _number(-0.008333333333333333, x) + series * square
    series = _number(0.08333333333333333, x) + series * square
    result = shift + base.log(z) - base.div(_number(0.5, x), z) - series * square
    result = tl.where(negative, result - reflected, result)
    result = tl.where(x == 0, base.div(-one, x), result)
    result = tl.where(pole, _number(float("nan"), x), result)
    return tl.where(x == _number(float("inf"), x), x, result)


@triton.jit
def trigamma(x):
    """Trigamma by reflection to x >= 1/2, six recurrences, and an asymptotic series (DLMF 5.15.6, 5.15.5, 5.15.8)."""
    one = _number(1.0, x)
    pi = _number(3.141592653589793, x)
    low = x < _number(0.5, x)
    sine = base.sin(pi * x)
    reflected = base.div(pi * pi, sine * sine)
    z = tl.where(low, one - x, x)
    total = tl.zeros_like(z)
    for _ in range(6):
        total = total + base.div(one, z * z)
        z = z + one
    square = base.div(one, z * z)
    series = _number(0.03333333333333333, x) - square * _number(0.023809523809523808, x)
    series = one + base.div(one, z * _number(2.0, x)) + square * (_number(0.16666666666666666, x) - square * series)
    total = total + base.div(series, z)
    return tl.where(low, reflected - total, total)


@triton.jit
def zeta(s, q):
    """The Hurwitz zeta function by the Euler-Maclaurin formula (DLMF 25.11.5)."""
    one = _number(1.0, s)
    zero = _number(0.0, s)
    nan = _number(float("nan"), s)
    inf = _number(float("inf"), s)
    pole = (q <= zero) & (base.floor(q) == q)
    undefined = (s < one) | ((q <= zero) & (base.floor(s) != s) & (pole == 0))
    z = tl.where(pole | undefined, one, q)
    total = tl.zeros_like(z)
    # At least nine terms are summed one by one, until z > 9, where the series converges fast. The larger s is, the
    # slower the series converges, but then the first terms are nearly all of the sum.
    count = tl.zeros_like(z)
    # The bound is not assigned to a variable, because Triton 3.6's interpreter would turn it into a block.
    for _ in range(base.largest(tl.where(z < zero, -base.floor(z), zero)) + 10):
        near = (z <= _number(9.0, s)) | (count < 9)
        total = tl.where(near, total + base.pow(z, -s), total)
        z = tl.where(near, z + one, z)
        count = count + 1.0
    power = base.pow(z, -s)
    # The series adds nothing to elements whose terms have become zero. The s or the z of such elements may be infinite.
    gone = power == zero
    s_tail = tl.where(gone, zero, s)
    z = tl.where(gone, one, z)
    total = total + base.div(z * power, s_tail - one) + power * _number(0.5, s)
    power = base.div(power, z)
    factor = s_tail
    total = total + _number(0.08333333333333333, s) * factor * power
    factor = factor * (s_tail + 1.0) * (s_tail + 2.0)
    power = base.div(power, z * z)
    total = total + _number(-0.001388888888888889, s) * factor * power
    factor = factor * (s_tail + 3.0) * (s_tail + 4.0)
    power = base.div(power, z * z)
    total = total + _number(3.306878306878307e-05, s) * factor * power
    factor = factor * (s_tail + 5.0) * (s_tail + 6.0)
    power = base.div(power, z * z)
    total = total + _number(-8.267195767195768e-07, s) * factor * power
    factor = factor * (s_tail + 7.0) * (s_tail + 8.0)
    power = base.div(power, z * z)
    total = total + _number(2.08767569878681e-08, s) * factor * power
    factor = factor * (s_tail + 9.0) * (s_tail + 10.0)
    power = base.div(power, z * z)
    total = total + _number(-5.284190138687493e-10, s) * factor * power
    factor = factor * (s_tail + 11.0) * (s_tail + 12.0)
    power = base.div(power, z * z)
    total = total + _number(1.3382536530684679e-11, s) * factor * power
    total = tl.where(pole, inf, total)
    return tl.where(s == one, inf, tl.where(undefined, nan, total))


@triton.jit
def igamma(a, x):
    """The regularized lower incomplete gamma function P(a, x)."""
    lower, _ = _incomplete_gamma(a.to(tl.float64), x.to(tl.float64))
    return lower.to(x.dtype)


@triton.jit
def igammac(a, x):
    """The regularized upper incomplete gamma function Q(a, x), 1 - P(a, x)."""
    _, upper = _incomplete_gamma(a.to(tl.float64), x.to(tl.float64))
    return upper.to(x.dtype)


@triton.jit
def _incomplete_gamma(a, x):
    """P and Q, by the series for x <= max(a, 1) (DLMF 8.11.4), or by the continued fraction for larger x (DLMF 8.9.2).

    If x is near a, the series and the fraction need about sqrt(a) terms. For a > 10000, the uniform expansion (DLMF
    8.12.3, 8.12.4) replaces the series and the fraction.
    """
    one = _number(1.0, x)
    zero = _number(0.0, x)
    nan = _number(float("nan"), x)
    inf = _number(float("inf"), x)
    undefined = (a < zero) | (x < zero) | ((a == zero) & ((x > zero) == 0)) | ((a == inf) & (x == inf))
    missing = (a != a) | (x != x)
    lowest = (x == zero) | (a == inf)
    highest = (a == zero) | (x == inf)
    regular = (undefined | lowest | highest | missing) == 0
    large = regular & (a > 10000.0)
    near = regular & (large == 0)
    b = tl.where(near, a, one)
    y = tl.where(near, x, one)
    front = base.exp(b * base.log(y) - y - base.lgamma(b + one))
    is_series = (y <= b) | (y <= one)
    z = tl.where(is_series, y, zero)
    term = one + zero * y
    total = term
    denominator = b
    # The modified Lentz algorithm (Press et al., Numerical Recipes).
    w = tl.where(is_series, _number(2.0, x) + b, y)
    tiny = _number(1e-300, x)
    even = w + one - b
    c = base.div(one, tiny) + zero * y
    d = base.div(one, even)
    fraction = d
    k = zero * y
    for _ in range(base.largest(_number(10.0, x) * base.sqrt(b)) + 100):
        denominator = denominator + one
        term = base.div(term * z, denominator)
        total = total + term
        k = k + one
        factor = k * (b - k)
        even = even + _number(2.0, x)
        d = factor * d + even
        d = tl.where(tl.abs(d) < tiny, tiny, d)
        c = even + base.div(factor, c)
        c = tl.where(tl.abs(c) < tiny, tiny, c)
        d = base.div(one, d)
        fraction = fraction * d * c
    by_series = front * total
    by_fraction = front * b * fraction
    lower = tl.where(is_series, by_series, one - by_fraction)
    upper = tl.where(is_series, one - by_series, by_fraction)
    # eta^2 / 2 = mu - log(1 + mu).
    e = tl.where(large, a, one)
    mu = tl.where(large, base.div(x - e, e), zero)
    half = tl.where(mu < -0.999999, inf, mu - base.log1p(tl.where(mu < -0.999999, zero, mu)))
    half = tl.where(half < zero, zero, half)
    size = base.sqrt(_number(2.0, x) * half)
    eta = tl.where(mu < zero, -size, size)
    t = tl.where(size > one, tl.where(mu < zero, -one, one), eta)  # for larger sizes, the exponential below is 0
    rest = _number(-0.00017875514403292181, x)
    rest = _number(0.0003527336860670194, x) + rest * t
    rest = _number(0.0011574074074074073, x) + rest * t
    rest = _number(-0.014814814814814815, x) + rest * t
    rest = _number(0.08333333333333333, x) + rest * t
    rest = _number(-0.3333333333333333, x) + rest * t
    rest = rest + base.div(_number(-0.001851851851851852, x) - _number(0.003472222222222222, x) * t, e)
    rest = rest * base.div(base.exp(-e * half), base.sqrt(_number(6.283185307179586, x) * e))
    edge = tl.where(mu < zero, -base.sqrt(e * half), base.sqrt(e * half))
    far_upper = _number(0.5, x) * base.erfc(edge) + rest
    far_lower = _number(0.5, x) * base.erfc(-edge) - rest
    lower = tl.where(large, far_lower, lower)
    upper = tl.where(large, far_upper, upper)
    lower = tl.where(lowest, zero, tl.where(highest, one, tl.where(missing, nan, lower)))
    upper = tl.where(lowest, one, tl.where(highest, zero, tl.where(missing, nan, upper)))
    lower = tl.where(undefined, nan, lower)
    upper = tl.where(undefined, nan, upper)
    return lower, upper


@triton.jit
def _hankel(x, order: tl.constexpr, sign: tl.constexpr):
    """The sum in the expansion of exp(-x) I_order(x) (`sign` -1) or exp(x) K_order(x) (`sign` 1) for large `x`.

    See DLMF 10.40.1 and 10.40.2. From x = 34 on, 14 terms are exact in float64.
    """
    term = tl.zeros_like(x) + 1.0
    total = term
    k = tl.zeros_like(x)
    for _ in range(14):
        k = k + 1.0
        odd = k * 2.0 - 1.0
        square: tl.constexpr = 4.0 * order * order
        term = base.div(term * (square - odd * odd) * (0.125 * sign), k * x)
        total = total + term
    return total


@triton.jit
def _bessel_ie(x, scaled, order: tl.constexpr):
    """exp(-abs(x)) I_order(abs(x)): `scaled` up to abs(x) = 50, and the expansion for large arguments beyond."""
    x = tl.abs(x)
    far = x > 50
    z = tl.where(far, x, _number(64.0, x))
    root = base.sqrt(z) * _number(2.5066282746310002, x)
    return tl.where(far, base.div(_hankel(z, order, -1), root), scaled)


@triton.jit
def bessel_i0e(x):
    return _bessel_i0e(x.to(tl.float64)).to(x.dtype)


@triton.jit
def _bessel_i0e(x):
    near = tl.where(tl.abs(x) > 50, tl.zeros_like(x), x)
    result = _bessel_ie(x, base.bessel_i0(near) * base.exp(-tl.abs(near)), 0)
    return tl.where(x != x, x, result)


@triton.jit
def bessel_i1e(x):
    return _bessel_i1e(x.to(tl.float64)).to(x.dtype)


@triton.jit
def _bessel_i1e(x):
    near = tl.where(tl.abs(x) > 50, tl.zeros_like(x), x)
    result = _bessel_ie(x, base.bessel_i1(tl.abs(near)) * base.exp(-tl.abs(near)), 1)
    return tl.where(x != x, x, tl.where(x < 0, result * -1.0, result))  # `-result` would lose the sign of 0


@triton.jit
def _bessel_ke(x, order: tl.constexpr):
    """exp(x) K_order(x) for x >= 1, by the trapezoidal rule for DLMF 10.32.9, or by the expansion for large `x`.

    With a step of 1/8, the rule is exact in float64 up to x = 34. For larger x, the integrand is too narrow.
    """
    far = x > 34
    z = tl.where(far, tl.zeros_like(x) + 34.0, x)
    total = tl.zeros_like(x) + 0.5
    half_t = tl.zeros_like(x)
    for _ in range(36):
        half_t = half_t + 0.0625
        sinh = base.sinh(half_t)
        height = sinh * sinh * 2.0  # cosh(t) - 1
        term = base.exp(z * height * -1.0)
        if order == 1:
            term = term * (height + 1.0)
        total = total + term
    z = tl.where(far, x, tl.zeros_like(x) + 64.0)
    root = base.div(tl.zeros_like(x) + 1.2533141373155003, base.sqrt(z))
    return tl.where(far, root * _hankel(z, order, 1), total * 0.125)


@triton.jit
def _bessel_k_near(x, order: tl.constexpr):
    """K_order(x) for x <= 1, by its series around 0 (DLMF 10.31.1, 10.31.2)."""
    quarter = x * x * 0.25
    log = base.log(x) - 0.6931471805599453  # log(x / 2) would be the logarithm of 0 for the smallest x
    power = tl.zeros_like(x) + 1.0
    total = tl.zeros_like(x)
    digammas = tl.zeros_like(x) - 0.5772156649015329
    k = tl.zeros_like(x)
    for _ in range(10):
        k = k + 1.0
        following = digammas + base.div(tl.zeros_like(x) + 1.0, k)
        if order == 0:
            total = total + power * (digammas - log)
            power = base.div(power * quarter, k * k)
        else:
            total = total + power * (log - (digammas + following) * 0.5)
            power = base.div(power * quarter, k * (k + 1.0))
        digammas = following
    if order == 1:
        total = base.div(tl.zeros_like(x) + 1.0, x) + total * x * 0.5
    return total


@triton.jit
def _bessel_k(x, order: tl.constexpr, scaled: tl.constexpr):
    one = _number(1.0, x)
    near = _bessel_k_near(tl.where(x < one, x, one), order)
    z = tl.where(x < one, one, x)
    far = _bessel_ke(z, order)
    if scaled:
        near = near * base.exp(tl.where(x < one, x, one))
    else:
        far = far * base.exp(-z)
    result = tl.where(x < one, near, far)
    result = tl.where(x == 0, _number(float("inf"), x), result)
    return tl.where((x < 0) | (x != x), _number(float("nan"), x), result)


@triton.jit
def bessel_k0(x):
    return _bessel_k(x.to(tl.float64), 0, False).to(x.dtype)


@triton.jit
def bessel_k1(x):
    return _bessel_k(x.to(tl.float64), 1, False).to(x.dtype)


@triton.jit
def bessel_k0e(x):
    return _bessel_k(x.to(tl.float64), 0, True).to(x.dtype)


@triton.jit
def bessel_k1e(x):
    return _bessel_k(x.to(tl.float64), 1, True).to(x.dtype)


@triton.jit
def spherical_bessel_j0(x):
    """sin(x) / x, or, near 0, the series of this function."""
    square = x * x
    series = _number(1.6059043836821613e-10, x)
    series = _number(-2.505210838544172e-08, x) + series * square
    series = _number(2.7557319223985893e-06, x) + series * square
    series = _number(-0.0001984126984126984, x) + series * square
    series = _number(0.008333333333333333, x) + series * square
    series = _number(-0.16666666666666666, x) + series * square
    series = _number(1.0, x) + series * square
    near = tl.abs(x) < _number(0.5, x)
    far = base.div(base.sin(x), tl.where(near, _number(1.0, x), x))
    result = tl.where(near, series, far)
    return tl.where(tl.abs(x) == _number(float("inf"), x), _number(0.0, x), result)


@triton.jit
def narrow(off, count):
    """Indices of elements in the dtype of `count`, which has 32 bits if they suffice. `count` may be a constant."""
    return off.to((count + tl.program_id(0) * 0).dtype)


__all__ = [
    "bessel_i0e",
    "bessel_i1e",
    "bessel_k0",
    "bessel_k0e",
    "bessel_k1",
    "bessel_k1e",
    "digamma",
    "frexp_exponent",
    "frexp_mantissa",
    "gcd",
    "igamma",
    "igammac",
    "int_div",
    "int_fmod",
    "int_pow",
    "int_remainder",
    "narrow",
    "nextafter_bfloat16",
    "nextafter_float16",
    "shift_left",
    "shift_right",
    "spherical_bessel_j0",
    "trigamma",
    "zeta",
]
