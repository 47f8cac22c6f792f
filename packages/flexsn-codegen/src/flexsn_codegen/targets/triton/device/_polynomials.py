"""Orthogonal polynomials of degree `n` in float64, by recurrence (DLMF 18.9), or from an angle for high degrees.

Only Chebyshev polynomials are computed from an angle. Polynomials of degree below 0 are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device import _base as base


@triton.jit
def _arguments(x, n):
    """The argument and the degree in float64, broadcast to one shape. The degree is rounded towards zero."""
    x, n = tl.broadcast(x.to(tl.float64), n.to(tl.float64))
    return x, base.trunc(n)


@triton.jit
def _chosen(first, second, n):
    """`second`, the polynomial of degree `n`, for degrees of at least 1, `first` for degree 0, and 0 below."""
    return tl.where(n >= 1, second, tl.where(n >= 0, first, tl.zeros_like(first)))


@triton.jit
def _chebyshev(x, n, sine: tl.constexpr, shift: tl.constexpr):
    """The polynomials of the first (`sine` 0, `shift` 0), second (1, 1), third (0, 0.5) and fourth kind (1, 0.5).

    With x = cos t, a polynomial is cos((n + shift) t) / cos(shift t) if `sine` is 0, and sin((n + shift) t) / sin(shift
    t) if `sine` is 1.
    """
    one = tl.zeros_like(x) + 1.0
    inside = tl.abs(x) <= 1
    # In [-1, 1], polynomials of high degree are computed from the angle. At -1 and 1, their limits are used.
    angle = base.acos(tl.where(inside, x, one))
    order = n + shift
    if sine == 1:
        value, scale = base.sin(order * angle), base.sin(angle * shift)
    else:
        value, scale = base.cos(order * angle), base.cos(angle * shift)
    odd = n - base.floor(n * 0.5) * 2.0
    sign = tl.where(x < 0, 1.0 - odd * 2.0, one)
    end = one
    if shift > 0:
        end = base.div(order, one * shift)
    if shift == 0.5:
        end = tl.where(x * (sine * 2 - 1) > 0, end, one)
    high = tl.where(tl.abs(x) == 1, sign * end, base.div(value, tl.where(scale == 0, one, scale)))
    by_angle = inside & (n > 32)
    before, after = one, x * 2.0
    if shift == 0:
        after = x
    elif shift == 0.5:
        after = after + 1.0 if sine == 1 else after - 1.0
    k = one
    for _ in range(base.largest(tl.where(by_angle, 0.0, n))):
        more = k < n
        following = x * after * 2.0 - before
        before = tl.where(more, after, before)
        after = tl.where(more, following, after)
        k = k + 1.0
    return tl.where(by_angle, high, _chosen(one, after, n))


@triton.jit
def chebyshev_t(x, n):
    x, n = _arguments(x, n)
    return _chebyshev(x, n, 0, 0.0)


@triton.jit
def chebyshev_u(x, n):
    x, n = _arguments(x, n)
    return _chebyshev(x, n, 1, 1.0)


@triton.jit
def chebyshev_v(x, n):
    x, n = _arguments(x, n)
    return _chebyshev(x, n, 0, 0.5)


@triton.jit
def chebyshev_w(x, n):
    x, n = _arguments(x, n)
    return _chebyshev(x, n, 1, 0.5)


@triton.jit
def _by_recurrence(x, n, first, family: tl.constexpr):
    """A polynomial, by the recurrence of its family. `first` is the polynomial of degree 1."""
    one = tl.zeros_like(x) + 1.0
    before, after, k = one, first, one
    for _ in range(base.largest(n)):
        more = k < n
        if family == "hermite_h":
            following = (x * after - k * before) * 2.0
        elif family == "hermite_he":
            following = x * after - k * before
        elif family == "laguerre_l":
            following = base.div((k * 2.0 + 1.0 - x) * after - k * before, k + 1.0)
        else:
            following = base.div((k * 2.0 + 1.0) * x * after - k * before, k + 1.0)
        before = tl.where(more, after, before)
        after = tl.where(more, following, after)
        k = k + 1.0
    return _chosen(one, after, n)


@triton.jit
def hermite_h(x, n):
    x, n = _arguments(x, n)
    return _by_recurrence(x, n, x * 2.0, "hermite_h")


@triton.jit
def hermite_he(x, n):
    x, n = _arguments(x, n)
    return _by_recurrence(x, n, x, "hermite_he")


@triton.jit
def laguerre_l(x, n):
    x, n = _arguments(x, n)
    return _by_recurrence(x, n, x * -1.0 + 1.0, "laguerre_l")


@triton.jit
def legendre_p(x, n):
    x, n = _arguments(x, n)
    return _by_recurrence(x, n, x, "legendre_p")


__all__ = [
    "chebyshev_t",
    "chebyshev_u",
    "chebyshev_v",
    "chebyshev_w",
    "hermite_h",
    "hermite_he",
    "laguerre_l",
    "legendre_p",
]
