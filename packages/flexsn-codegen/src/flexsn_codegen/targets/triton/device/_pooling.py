"""Pooling in two dimensions: the maximum, and where it is, in few bits; the average; their gradients.

A tensor is a matrix in its memory. Channels-last, a row is a pixel and a column a channel; otherwise, a row is the
plane of a channel and a column a pixel. Of a maximum, 2, 4 or 8 bits of a code say at which position of its window it
is; `PER` rows that follow each other share a row of bytes.

The first of equal numbers is the maximum, and the last NaN, as in PyTorch. Sums are in float32, in PyTorch's order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._base import div, load, store


@triton.jit
def _place(row, column, height, width, LAST: tl.constexpr):
    """Row and column of a pixel in its plane, and the number of the image, or of the plane."""
    if LAST:
        pixel = row % (height * width)
        image = row // (height * width)
    else:
        pixel = column
        image = row
    return pixel // width, pixel % width, image


@triton.jit
def _begin(image, column, channels, height, width, LAST: tl.constexpr):
    """Where the first number of a channel of an image is."""
    begin = image.to(tl.int64) * (tl.cast(height, tl.int64) * width)
    if LAST:
        begin = begin * channels + column
    return begin


@triton.jit
def _parts(
    top,
    left,
    height,
    width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DIVISOR: tl.constexpr,
    PADS: tl.constexpr,
):
    """By how much the sum over a window is divided."""
    if DIVISOR != 0:
        return tl.zeros_like(top + left) + DIVISOR
    bottom = tl.minimum(top + KH, height + PH)
    right = tl.minimum(left + KW, width + PW)
    if PADS:
        return (bottom - top) * (right - left)
    down = tl.minimum(bottom, height) - tl.maximum(top, 0)
    across = tl.minimum(right, width) - tl.maximum(left, 0)
    return down * across


@triton.jit
def maximum_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    rows,
    columns,
    channels,
    height,
    width,
    out_height,
    out_width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    LAST: tl.constexpr,
    CODES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """`y [rows, columns]`, and `codes [cdiv(rows, 8 // BITS), columns]` if `CODES`."""
    PER: tl.constexpr = 8 // BITS
    byte_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    unit = channels if LAST else 1
    packed = tl.zeros([ROWS, COLUMNS], tl.int32)
    for part in tl.static_range(PER):
        row = byte_row * PER + part
        there = (row < rows) & (column < columns)
        out_y, out_x, image = _place(row, column, out_height, out_width, LAST)
        begin = _begin(image, column, channels, height, width, LAST)
        top = out_y * SH - PH
        left = out_x * SW - PW
        first_y = tl.maximum((DH - 1 - top) // DH, 0)
        first_x = tl.maximum((DW - 1 - left) // DW, 0)
        code = first_y * KW + first_x + tl.zeros([ROWS, COLUMNS], tl.int32)
        best = tl.full([ROWS, COLUMNS], float("-inf"), ACC)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y = top + i * DH
                x = left + j * DW
                inside = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
                value = load(x_ptr + begin + (y.to(tl.int64) * width + x) * unit, inside)
                taken = inside & ((value > best) | (value != value))
                best = tl.where(taken, value, best)
                code = tl.where(taken, i * KW + j, code)
        store(y_ptr + row.to(tl.int64) * columns + column, best, there)
        packed = packed | (code << (BITS * part))
    if CODES:
        held = (byte_row * PER < rows) & (column < columns)
        tl.store(codes_ptr + byte_row.to(tl.int64) * columns + column, packed.to(tl.uint8), mask=held)


@triton.jit
def average_kernel(
    x_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    height,
    width,
    out_height,
    out_width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    LAST: tl.constexpr,
    DIVISOR: tl.constexpr,
    PADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """`y [rows, columns]`."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    unit = channels if LAST else 1
    there = (row < rows) & (column < columns)
    out_y, out_x, image = _place(row, column, out_height, out_width, LAST)
    begin = _begin(image, column, channels, height, width, LAST)
    top = out_y * SH - PH
    left = out_x * SW - PW
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            y = top + i
            x = left + j
            inside = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            total += load(x_ptr + begin + (y.to(tl.int64) * width + x) * unit, inside)
    parts = _parts(top, left, height, width, KH, KW, PH, PW, DIVISOR, PADS)
    store(y_ptr + row.to(tl.int64) * columns + column, div(total, parts.to(total.dtype) + tl.zeros_like(total)), there)


@triton.jit
def gradient_kernel(
    g_ptr,
    codes_ptr,
    out_ptr,
    rows,
    columns,
    channels,
    height,
    width,
    out_height,
    out_width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    LAST: tl.constexpr,
    BITS: tl.constexpr,
    DIVISOR: tl.constexpr,
    PADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """`out [rows, columns]`, the gradient of the input: of a maximum by its codes, of an average if `BITS` is 0."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < rows) & (column < columns)
    y, x, image = _place(row, column, height, width, LAST)
    plane = out_height * out_width
    across = channels if LAST else plane
    total = tl.zeros([ROWS, COLUMNS], ACC)
    PER: tl.constexpr = 8 // BITS if BITS else 1
    # Windows that can hold a pixel, in each direction.
    DOWN: tl.constexpr = ((KH - 1) * DH + SH) // SH
    ASIDE: tl.constexpr = ((KW - 1) * DW + SW) // SW
    for i in tl.static_range(DOWN):
        out_y = (y + PH) // SH - (DOWN - 1 - i)
        off_y = y + PH - out_y * SH
        in_y = (out_y >= 0) & (out_y < out_height) & (off_y % DH == 0) & (off_y // DH < KH)
        for j in tl.static_range(ASIDE):
            out_x = (x + PW) // SW - (ASIDE - 1 - j)
            off_x = x + PW - out_x * SW
            in_x = (out_x >= 0) & (out_x < out_width) & (off_x % DW == 0) & (off_x // DW < KW)
            inside = there & in_y & in_x
            if LAST:
                out_row = image * plane + out_y * out_width + out_x
                out_column = column
            else:
                out_row = row
                out_column = out_y * out_width + out_x
            gradient = load(g_ptr + out_row.to(tl.int64) * across + out_column, inside)
            if BITS == 0:
                parts = _parts(out_y * SH - PH, out_x * SW - PW, height, width, KH, KW, PH, PW, DIVISOR, PADS)
                divisor = tl.maximum(parts, 1).to(total.dtype) if DIVISOR == 0 else parts.to(total.dtype)
                total += tl.where(inside, div(gradient, divisor + tl.zeros_like(total)), 0.0)
            else:
                at = codes_ptr + (out_row // PER).to(tl.int64) * across + out_column
                byte = tl.load(at, mask=inside, other=0).to(tl.int32)
                code = (byte >> ((out_row % PER) * BITS)) & ((1 << BITS) - 1)
                total += tl.where(inside & (code == off_y // DH * KW + off_x // DW), gradient, 0.0)
    store(out_ptr + row.to(tl.int64) * columns + column, total, there)
