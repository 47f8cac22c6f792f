"""Delayed sequences and their gradients. A delay interpolates between two neighbouring steps, or is a filter.

A tensor is `[T, elements]` in memory. The steps before the first step are `[MOST, elements]`, or zeros. Element `e` has
the delay with the index `e // inner % size`. An interpolation adds a fraction of the difference of two neighbouring
steps to the later step, and rounds where PyTorch's operations round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._base import load, round_bfloat16, round_float16, store


@triton.jit
def _elements(elements, inner, size, BLOCK: tl.constexpr):
    """A program's elements, the indices of their delays, a mask of existing elements, and the number of elements."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return off, (off // inner) % size, off < elements, tl.cast(elements, tl.int64)


@triton.jit
def _rounded(x, HALF: tl.constexpr):
    if HALF == 1:
        x = round_float16(x)
    if HALF == 2:
        x = round_bfloat16(x)
    return x


@triton.jit
def _at(x_ptr, past_ptr, t, off, step, mask, T, MOST: tl.constexpr, PAST: tl.constexpr):
    """The value of step `t`, which is 0 if `t` is after the last step or before all stored steps."""
    value = load(x_ptr + t * step + off, mask & (t >= 0) & (t < T))
    if PAST:
        value = tl.where(t < 0, load(past_ptr + (t + MOST) * step + off, mask & (t < 0) & (t >= -MOST)), value)
    return value


@triton.jit
def between_kernel(
    x_ptr,
    past_ptr,
    whole_ptr,
    fraction_ptr,
    y_ptr,
    T,
    elements,
    inner,
    size,
    MOST: tl.constexpr,
    PAST: tl.constexpr,
    FRACTION: tl.constexpr,
    HALF: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes `y[t]`, which is the value `whole` steps before `t`.

    If `FRACTION`, `y[t]` is interpolated between this value and the value `whole + 1` steps before `t`.
    """
    off, number, mask, step = _elements(elements, inner, size, BLOCK)
    whole = tl.load(whole_ptr + number, mask=mask, other=0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * STEPS
    if FRACTION:
        fraction = load(fraction_ptr + number, mask)
        later = _at(x_ptr, past_ptr, first - whole - 1, off, step, mask, T, MOST, PAST)
    for k in tl.static_range(STEPS):
        late = _at(x_ptr, past_ptr, first + k - whole, off, step, mask & (first + k < T), T, MOST, PAST)
        y = late
        if FRACTION:
            y = late + _rounded(fraction * _rounded(later - late, HALF), HALF)
            later = late
        store(y_ptr + (first + k) * step + off, y, mask & (first + k < T))


@triton.jit
def between_gradient_kernel(
    grad_ptr,
    x_ptr,
    past_ptr,
    whole_ptr,
    fraction_ptr,
    grad_x_ptr,
    grad_past_ptr,
    grad_fraction_ptr,
    T,
    elements,
    inner,
    size,
    MOST: tl.constexpr,
    PAST: tl.constexpr,
    FRACTION: tl.constexpr,
    LEARNED: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of `between_kernel`. The gradient of the fractions has one value for each element of a step."""
    off, number, mask, step = _elements(elements, inner, size, BLOCK)
    whole = tl.load(whole_ptr + number, mask=mask, other=0).to(tl.int64)
    if FRACTION:
        fraction = load(fraction_ptr + number, mask)
    begin = tl.cast(T, tl.int64) * 0
    if PAST:
        begin = begin - MOST
    now = _at(grad_ptr, grad_ptr, begin + whole, off, step, mask, T, MOST, False)
    total = now * 0
    # The total begins with 0, even if `now * 0` is NaN because the gradient is infinite or NaN.
    total = tl.where(total == 0, total, 0.0)
    if PAST:
        for t in range(-MOST, 0):
            came = now
            if FRACTION:
                now = _at(grad_ptr, grad_ptr, t + whole + 1, off, step, mask, T, MOST, False)
                came = (came - fraction * came) + fraction * now
            if LEARNED:
                value = load(past_ptr + (t + MOST) * step + off, mask)
                before = _at(grad_ptr, grad_ptr, t + whole, off, step, mask, T, MOST, False)
                total += value * (now - before)
            store(grad_past_ptr + (t + MOST) * step + off, came, mask)
            if not FRACTION:
                now = _at(grad_ptr, grad_ptr, t + whole + 1, off, step, mask, T, MOST, False)
    for c in range(tl.cdiv(T, STEPS)):
        first = tl.cast(c, tl.int64) * STEPS
        for k in tl.static_range(STEPS):
            inside = mask & (first + k < T)
            came = now
            following = _at(grad_ptr, grad_ptr, first + k + whole + 1, off, step, mask, T, MOST, False)
            if FRACTION:
                came = (now - fraction * now) + fraction * following
            if LEARNED:
                total += load(x_ptr + (first + k) * step + off, inside) * (following - now)
            store(grad_x_ptr + (first + k) * step + off, came, inside)
            now = following
    if LEARNED:
        store(grad_fraction_ptr + off, total, mask)


@triton.jit
def filter_kernel(
    x_ptr,
    past_ptr,
    taps_ptr,
    y_ptr,
    T,
    elements,
    inner,
    size,
    MOST: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`y[t] = sum over l of taps[l] x[t - l]`. A program computes four steps, and loads each value only once."""
    off, number, mask, step = _elements(elements, inner, size, BLOCK)
    first = tl.program_id(1).to(tl.int64) * 4
    v0 = _at(x_ptr, past_ptr, first, off, step, mask, T, MOST, PAST)
    v1 = _at(x_ptr, past_ptr, first + 1, off, step, mask, T, MOST, PAST)
    v2 = _at(x_ptr, past_ptr, first + 2, off, step, mask, T, MOST, PAST)
    v3 = _at(x_ptr, past_ptr, first + 3, off, step, mask, T, MOST, PAST)
    y0 = tl.zeros_like(v0)
    y1 = tl.zeros_like(v0)
    y2 = tl.zeros_like(v0)
    y3 = tl.zeros_like(v0)
    for n in range(MOST + 1):
        tap = load(taps_ptr + n * size + number, mask)
        y0 += tap * v0
        y1 += tap * v1
        y2 += tap * v2
        y3 += tap * v3
        v3 = v2
        v2 = v1
        v1 = v0
        v0 = _at(x_ptr, past_ptr, first - n - 1, off, step, mask, T, MOST, PAST)
    store(y_ptr + first * step + off, y0, mask & (first < T))
    store(y_ptr + (first + 1) * step + off, y1, mask & (first + 1 < T))
    store(y_ptr + (first + 2) * step + off, y2, mask & (first + 2 < T))
    store(y_ptr + (first + 3) * step + off, y3, mask & (first + 3 < T))


@triton.jit
def filter_gradient_kernel(
    grad_ptr,
    x_ptr,
    past_ptr,
    taps_ptr,
    slopes_ptr,
    grad_x_ptr,
    grad_past_ptr,
    grad_delay_ptr,
    T,
    elements,
    inner,
    size,
    MOST: tl.constexpr,
    PAST: tl.constexpr,
    LEARNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of `filter_kernel`. `slopes` are the derivatives of the taps with respect to the delay."""
    off, number, mask, step = _elements(elements, inner, size, BLOCK)
    begin = tl.cast(T, tl.int64) * 0
    if PAST:
        begin = begin - MOST
    total = tl.zeros_like(load(taps_ptr + number, mask))
    for c in range(tl.cdiv(T - begin, 4)):
        first = begin + c * 4
        g0 = _at(grad_ptr, grad_ptr, first, off, step, mask, T, MOST, False)
        g1 = _at(grad_ptr, grad_ptr, first + 1, off, step, mask, T, MOST, False)
        g2 = _at(grad_ptr, grad_ptr, first + 2, off, step, mask, T, MOST, False)
        g3 = _at(grad_ptr, grad_ptr, first + 3, off, step, mask, T, MOST, False)
        a0 = tl.zeros_like(g0)
        a1 = tl.zeros_like(g0)
        a2 = tl.zeros_like(g0)
        a3 = tl.zeros_like(g0)
        b0 = tl.zeros_like(g0)
        b1 = tl.zeros_like(g0)
        b2 = tl.zeros_like(g0)
        b3 = tl.zeros_like(g0)
        for n in range(MOST + 1):
            tap = load(taps_ptr + n * size + number, mask)
            a0 += tap * g0
            a1 += tap * g1
            a2 += tap * g2
            a3 += tap * g3
            if LEARNED:
                slope = load(slopes_ptr + n * size + number, mask)
                b0 += slope * g0
                b1 += slope * g1
                b2 += slope * g2
                b3 += slope * g3
            g0 = g1
            g1 = g2
            g2 = g3
            g3 = _at(grad_ptr, grad_ptr, first + n + 4, off, step, mask, T, MOST, False)
        total += _taken(x_ptr, past_ptr, grad_x_ptr, grad_past_ptr, first, a0, b0, off, step, mask, T, MOST, PAST)
        total += _taken(x_ptr, past_ptr, grad_x_ptr, grad_past_ptr, first + 1, a1, b1, off, step, mask, T, MOST, PAST)
        total += _taken(x_ptr, past_ptr, grad_x_ptr, grad_past_ptr, first + 2, a2, b2, off, step, mask, T, MOST, PAST)
        total += _taken(x_ptr, past_ptr, grad_x_ptr, grad_past_ptr, first + 3, a3, b3, off, step, mask, T, MOST, PAST)
    if LEARNED:
        store(grad_delay_ptr + off, total, mask)


@triton.jit
def _taken(
    x_ptr,
    past_ptr,
    grad_x_ptr,
    grad_past_ptr,
    t,
    a,
    b,
    off,
    step,
    mask,
    T,
    MOST: tl.constexpr,
    PAST: tl.constexpr,
):
    """Stores `a`, the gradient of the value of step `t`. Returns this value's contribution to the delay's gradient."""
    store(grad_x_ptr + t * step + off, a, mask & (t >= 0) & (t < T))
    if PAST:
        store(grad_past_ptr + (t + MOST) * step + off, a, mask & (t < 0))
    return _at(x_ptr, past_ptr, t, off, step, mask, T, MOST, PAST) * b
