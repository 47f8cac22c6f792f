"""Pooling in two dimensions: maxima with their positions in a few bits, averages, and their gradients.

A program computes a block of rows and columns. If channels are last, a row is a pixel and a column is a channel.
Otherwise, a row is a row of an image, a column is a pixel of this row, and each channel is a separate image.
Coordinates are `[ROWS, 1]` or `[1, COLUMNS]`, so that only their sums are computed for each element of the block.

The size of the dimension that is innermost in memory is passed as a number of units. Channels and the width of the
input have units of `UNIT` elements, and the width of the output has units of `OUT_UNIT` elements.

A code of 2, 4 or 8 bits is the position of a maximum in its window. A byte contains `PER` codes: those of `PER` rows,
if channels are last, otherwise those of the same pixel in `PER` images.

As in PyTorch, the position is that of the first maximum if several values are equal, and that of the last NaN if values
are NaN. Sums are in float32, or in float64 for float64 values, and in PyTorch's order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._base import div, load, store


@triton.jit
def _block(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Indices of the rows and of the columns of a program's block."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    return row, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _counted(channels, width, out_width, LAST: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr):
    """The number of channels and the two widths in elements. The size of the innermost dimension is passed in units."""
    if LAST:
        channels = channels * UNIT
    else:
        width = width * UNIT
        out_width = out_width * OUT_UNIT
    return channels, width, out_width


@triton.jit
def _extent(images, channels, height, width, LAST: tl.constexpr):
    """The numbers of rows and of columns of all images. Blocks consist of such rows and columns."""
    if LAST:
        rows = images * height * width
        columns = channels
    else:
        rows = images * height
        columns = width
    return rows, columns


@triton.jit
def _place(row, column, height, width, LAST: tl.constexpr):
    """The index of the image, and the row and the column in this image."""
    if LAST:
        line = row // width
        x = row % width
    else:
        line = row
        x = column
    return line // height, line % height, x


@triton.jit
def _at(pointer, image, y, x, column, height, width, channels, LAST: tl.constexpr):
    """Pointers to the pixels `(y, x)` of images."""
    line = (image * height + y).to(tl.int64) * width
    return pointer + (line + x) * channels + column if LAST else pointer + line + x


@triton.jit
def _pixels(
    x_ptr,
    image,
    y,
    out_x,
    column,
    in_y,
    columns,
    channels,
    height,
    width,
    OFF: tl.constexpr,
    SW: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Values of the input at `(y, SW * out_x + OFF)`, or `OTHER` outside of the image."""
    if LAST or SW != 2:
        x = out_x * SW + OFF
        at = _at(x_ptr, image, y, x, column, height, width, channels, LAST)
        value = load(at, in_y & ((column < columns) & (x >= 0) & (x < width)), OTHER)
    else:
        # Each column uses one value of a pair. Loads of complete pairs are contiguous, so pairs are loaded and then
        # split.
        x = (tl.program_id(1) * COLUMNS + OFF // 2) * 2 + tl.arange(0, 2 * COLUMNS)[None, :]
        at = _at(x_ptr, image, y, x, column, height, width, channels, LAST)
        pairs = load(at, in_y & ((x >= 0) & (x < width)), OTHER)
        first, second = tl.split(tl.reshape(pairs, [pairs.shape[0], COLUMNS, 2]))
        value = first if OFF % 2 == 0 else second
    return value


@triton.jit
def _divided(
    total,
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
    """Sums over windows, divided by `DIVISOR`, or by the number of positions in each window if `DIVISOR` is 0."""
    if DIVISOR == 0:
        bottom = tl.minimum(top + KH, height + PH)
        right = tl.minimum(left + KW, width + PW)
        if PADS:
            down = bottom - top
            across = right - left
        else:
            down = tl.minimum(bottom, height) - tl.maximum(top, 0)
            across = tl.minimum(right, width) - tl.maximum(left, 0)
        # The divisor is at least 1, because windows outside of the output may have no positions.
        parts = tl.maximum(down * across, 1)
        total = div(total, parts.to(total.dtype) + tl.zeros_like(total))
    elif DIVISOR > 0 and (DIVISOR & (DIVISOR - 1)) == 0:
        total = total * (1.0 / DIVISOR)
    else:
        total = div(total, tl.zeros_like(total) + DIVISOR)
    return total


@triton.jit
def maximum_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    images,
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
    UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    CODES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Stores maxima and, if `CODES`, codes.

    The bytes of codes are `[cdiv(images, PER), ...]`, or `[cdiv(pixels, PER), channels]` if `LAST`.
    """
    PER: tl.constexpr = 8 // BITS
    byte_row, column = _block(ROWS, COLUMNS)
    channels, width, out_width = _counted(channels, width, out_width, LAST, UNIT, OUT_UNIT)
    rows, columns = _extent(images, channels, out_height, out_width, LAST)
    packed = tl.zeros([ROWS, COLUMNS], tl.int32)
    for part in range(PER):
        if LAST:
            row = byte_row * PER + part
        else:
            row = (byte_row // out_height * PER + part) * out_height + byte_row % out_height
        image, out_y, out_x = _place(row, column, out_height, out_width, LAST)
        top = out_y * SH - PH
        left = out_x * SW - PW
        first_y = tl.maximum((DH - 1 - top) // DH, 0)
        first_x = tl.maximum((DW - 1 - left) // DW, 0)
        code = first_y * KW + first_x + tl.zeros([ROWS, COLUMNS], tl.int32)
        best = tl.full([ROWS, COLUMNS], float("-inf"), ACC)
        for i in tl.static_range(KH):
            y = top + i * DH
            in_y = (row < rows) & (y >= 0) & (y < height)
            for j in tl.static_range(KW):
                value = _pixels(x_ptr, image, y, out_x, column, in_y, columns, channels, height, width, j * DW - PW, SW,
                                LAST, COLUMNS, float("-inf"))  # fmt: skip
                taken = (value > best) | (value != value)
                best = tl.where(taken, value, best)
                code = tl.where(taken, i * KW + j, code)
        store(y_ptr + row.to(tl.int64) * columns + column, best, (row < rows) & (column < columns))
        packed = packed | (code << (BITS * part))
    if CODES:
        held = (byte_row * PER < rows if LAST else byte_row // out_height * PER < images) & (column < columns)
        tl.store(codes_ptr + byte_row.to(tl.int64) * columns + column, packed.to(tl.uint8), mask=held)


@triton.jit
def average_kernel(
    x_ptr,
    y_ptr,
    images,
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
    UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    DIVISOR: tl.constexpr,
    PADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Averages over windows."""
    row, column = _block(ROWS, COLUMNS)
    channels, width, out_width = _counted(channels, width, out_width, LAST, UNIT, OUT_UNIT)
    rows, columns = _extent(images, channels, out_height, out_width, LAST)
    image, out_y, out_x = _place(row, column, out_height, out_width, LAST)
    top = out_y * SH - PH
    left = out_x * SW - PW
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for i in tl.static_range(KH):
        y = top + i
        in_y = (row < rows) & (y >= 0) & (y < height)
        for j in tl.static_range(KW):
            total += _pixels(x_ptr, image, y, out_x, column, in_y, columns, channels, height, width, j - PW, SW, LAST,
                             COLUMNS, 0.0)  # fmt: skip
    total = _divided(total, top, left, height, width, KH, KW, PH, PW, DIVISOR, PADS)
    store(y_ptr + row.to(tl.int64) * columns + column, total, (row < rows) & (column < columns))


@triton.jit
def _pixel_gradient(
    g_ptr,
    codes_ptr,
    in_rows,
    in_columns,
    image,
    cell_y,
    cell_x,
    column,
    channels,
    height,
    width,
    out_height,
    out_width,
    A: tl.constexpr,
    B: tl.constexpr,
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
    """Gradients of the pixels `(A, B)` of cells of `SH x SW` pixels.

    The windows that contain such a pixel are at constant offsets from its cell, and contain it at constant positions.
    """
    PER: tl.constexpr = 8 // BITS if BITS else 1
    # The number of windows that can contain a pixel, in each direction.
    DOWN: tl.constexpr = ((KH - 1) * DH + SH) // SH
    ASIDE: tl.constexpr = ((KW - 1) * DW + SW) // SW
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for i in tl.static_range(DOWN):
        out_y = cell_y + ((A + PH) // SH - (DOWN - 1 - i))
        in_y = in_rows & (out_y >= 0) & (out_y < out_height)
        off_y = (A + PH) % SH + (DOWN - 1 - i) * SH
        for j in tl.static_range(ASIDE):
            off_x = (B + PW) % SW + (ASIDE - 1 - j) * SW
            if off_y % DH == 0 and off_y // DH < KH and off_x % DW == 0 and off_x // DW < KW:
                out_x = cell_x + ((B + PW) // SW - (ASIDE - 1 - j))
                inside = in_y & ((out_x >= 0) & (out_x < out_width))
                if LAST:
                    inside = inside & in_columns
                at = _at(g_ptr, image, out_y, out_x, column, out_height, out_width, channels, LAST)
                gradient = load(at, inside)
                if BITS == 0:
                    top = out_y * SH - PH
                    left = out_x * SW - PW
                    total += _divided(gradient, top, left, height, width, KH, KW, PH, PW, DIVISOR, PADS)
                else:
                    if LAST:
                        pixel = (image * out_height + out_y) * out_width + out_x
                        byte_at = codes_ptr + (pixel // PER).to(tl.int64) * channels + column
                        part = pixel % PER
                    else:
                        byte_at = _at(codes_ptr, image // PER, out_y, out_x, column, out_height, out_width, 1, LAST)
                        part = image % PER
                    byte = tl.load(byte_at, mask=inside, other=0).to(tl.int32)
                    code = (byte >> (part * BITS)) & ((1 << BITS) - 1)
                    total += tl.where(code == off_y // DH * KW + off_x // DW, gradient, 0.0)
    return total


@triton.jit
def gradient_kernel(
    g_ptr,
    codes_ptr,
    out_ptr,
    images,
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
    UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    BITS: tl.constexpr,
    DIVISOR: tl.constexpr,
    PADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of the input of maxima, from their codes, or of averages, if `BITS` is 0.

    Rows and columns are those of cells of `SH x SW` pixels. All cells have windows at the same relative positions.
    """
    row, column = _block(ROWS, COLUMNS)
    channels, width, out_width = _counted(channels, width, out_width, LAST, UNIT, OUT_UNIT)
    cells_down = tl.cdiv(height, SH)
    cells_across = tl.cdiv(width, SW)
    rows, columns = _extent(images, channels, cells_down, cells_across, LAST)
    image, cell_y, cell_x = _place(row, column, cells_down, cells_across, LAST)
    in_rows = row < rows
    in_columns = column < columns
    for a in tl.static_range(SH):
        y = cell_y * SH + a
        in_y = in_rows & (y < height)
        if SW == 2:
            # The gradients of the two pixels use the same loads.
            even = _pixel_gradient(
                g_ptr, codes_ptr, in_rows, in_columns, image, cell_y, cell_x, column, channels, height, width,
                out_height, out_width, a, 0, KH, KW, SH, SW, PH, PW, DH, DW, LAST, BITS, DIVISOR, PADS, ROWS, COLUMNS,
                ACC,
            )  # fmt: skip
            odd = _pixel_gradient(
                g_ptr, codes_ptr, in_rows, in_columns, image, cell_y, cell_x, column, channels, height, width,
                out_height, out_width, a, 1, KH, KW, SH, SW, PH, PW, DH, DW, LAST, BITS, DIVISOR, PADS, ROWS, COLUMNS,
                ACC,
            )  # fmt: skip
            x = cell_x * 2
            if LAST:
                at = _at(out_ptr, image, y, x, column, height, width, channels, LAST)
                store(at, even, in_y & in_columns)
                store(at + channels, odd, in_y & ((x + 1 < width) & in_columns))
            else:
                x = tl.program_id(1) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)[None, :]
                at = _at(out_ptr, image, y, x, x, height, width, channels, LAST)
                store(at, tl.interleave(even, odd), in_y & (x < width))
        else:
            for b in tl.static_range(SW):
                total = _pixel_gradient(
                    g_ptr, codes_ptr, in_rows, in_columns, image, cell_y, cell_x, column, channels, height, width,
                    out_height, out_width, a, b, KH, KW, SH, SW, PH, PW, DH, DW, LAST, BITS, DIVISOR, PADS, ROWS,
                    COLUMNS, ACC,
                )  # fmt: skip
                x = cell_x * SW + b
                at = _at(out_ptr, image, y, x, column, height, width, channels, LAST)
                store(at, total, in_y & (in_columns & (x < width)))
