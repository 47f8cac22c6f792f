"""Mean and variance per channel, from float32 or float64 sums that are as exact as sums of centred data.

Each thread merges four values at a time into a count, a mean and a sum of squared deviations (Chan's formula), so that
no large sum is subtracted from another large sum. The first value of a channel is subtracted from all of its values.
This keeps means small if deviations are small. The results of threads, and then of programs, are merged in a fixed
order, so means and variances do not change between runs.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1982.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The number of tiles that a program loads before it uses the first one.
AHEAD = 4
_AHEAD = tl.constexpr(AHEAD)


@triton.jit
def _origin(x, ACC: tl.constexpr):
    """The value that is subtracted from all values of a channel: the first value, or 0 if that is infinite or NaN."""
    x = x.to(ACC)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _merged(count, mean, spread, a, b, c, d, in_a, in_b, in_c, in_d):
    """Count, mean and sum of squared deviations with four more values. `in_a` to `in_d` mark the values that exist."""
    more = in_a.to(mean.dtype) + in_b.to(mean.dtype) + in_c.to(mean.dtype) + in_d.to(mean.dtype)
    of_four = (tl.where(in_a, a, 0.0) + tl.where(in_b, b, 0.0)) + (tl.where(in_c, c, 0.0) + tl.where(in_d, d, 0.0))
    of_four = of_four / tl.maximum(more, 1.0)
    a = tl.where(in_a, a - of_four, 0.0)
    b = tl.where(in_b, b - of_four, 0.0)
    c = tl.where(in_c, c - of_four, 0.0)
    d = tl.where(in_d, d - of_four, 0.0)
    total = count + more
    share = more / tl.maximum(total, 1.0)
    apart = of_four - mean
    spread += ((a * a + b * b) + (c * c + d * d)) + apart * apart * (count * share)
    return total, mean + apart * share, spread


@triton.jit
def _merged_along(count, mean, spread, AXIS: tl.constexpr):
    """Counts, means and sums of squared deviations, merged along an axis."""
    total = tl.sum(count, AXIS)
    middle = tl.sum(count * mean, AXIS) / tl.maximum(total, 1.0)
    apart = mean - tl.expand_dims(middle, AXIS)
    return total, middle, tl.sum(spread + count * apart * apart, AXIS)


@triton.jit
def rows_kernel(
    x_ptr,
    parts_ptr,
    rows,
    columns,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """`x [rows, columns]` -> `parts [programs, 3, columns]`: counts, means and sums of squared deviations of columns.

    A program reads `tiles` tiles of `ROWS` rows. `tiles` is a multiple of `AHEAD`. Means are relative to the first row.
    """
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    origin = _origin(tl.load(x_ptr + column, mask=there, other=0.0), ACC)[None, :]
    count = tl.zeros([ROWS, 1], ACC)
    mean = tl.zeros([ROWS, COLUMNS], ACC)
    spread = tl.zeros([ROWS, COLUMNS], ACC)
    for i in range(0, tiles, _AHEAD):
        row = (program * tiles + i) * ROWS + tl.arange(0, ROWS)[:, None]
        at = x_ptr + row.to(tl.int64) * columns + column[None, :]
        step = tl.cast(columns, tl.int64) * ROWS
        in_a = row < rows
        in_b = row < rows - ROWS
        in_c = row < rows - 2 * ROWS
        in_d = row < rows - 3 * ROWS
        a = tl.load(at, mask=in_a & there[None, :], other=0.0)
        b = tl.load(at + step, mask=in_b & there[None, :], other=0.0)
        c = tl.load(at + 2 * step, mask=in_c & there[None, :], other=0.0)
        d = tl.load(at + 3 * step, mask=in_d & there[None, :], other=0.0)
        count, mean, spread = _merged(
            count,
            mean,
            spread,
            a.to(ACC) - origin,
            b.to(ACC) - origin,
            c.to(ACC) - origin,
            d.to(ACC) - origin,
            in_a,
            in_b,
            in_c,
            in_d,
        )
    counts = count + tl.zeros([ROWS, COLUMNS], ACC)
    total, middle, squares = _merged_along(counts, mean, spread, 0)
    out = parts_ptr + tl.cast(program, tl.int64) * 3 * columns + column
    tl.store(out, total, mask=there)
    tl.store(out + columns, middle, mask=there)
    tl.store(out + 2 * columns, squares, mask=there)


@triton.jit
def _tile_of(tile, across, samples, size, SAMPLES: tl.constexpr, SIZE: tl.constexpr):
    """The samples and positions of a tile's values, and a mask of the values that exist."""
    sample = tile // across * SAMPLES + tl.arange(0, SAMPLES)[:, None]
    place = tile % across * SIZE + tl.arange(0, SIZE)[None, :]
    return sample, place, (sample < samples) & (place < size)


@triton.jit
def planes_kernel(
    x_ptr,
    parts_ptr,
    samples,
    channels,
    size,
    tiles,
    SAMPLES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
):
    """`x [samples, channels, size]` -> `parts [programs, 3, channels]`, the statistics of channels. See `rows_kernel`.

    A program reads `tiles` tiles of one channel. A tile has `SAMPLES` samples and `SIZE` positions. Means are relative
    to the channel's first value.
    """
    channel = tl.program_id(0)
    program = tl.program_id(1)
    across = tl.cdiv(size, SIZE)
    start = x_ptr + tl.cast(channel, tl.int64) * size
    origin = _origin(tl.load(start), ACC)
    stride = tl.cast(channels, tl.int64) * size
    count = tl.zeros([SAMPLES, SIZE], ACC)
    mean = tl.zeros([SAMPLES, SIZE], ACC)
    spread = tl.zeros([SAMPLES, SIZE], ACC)
    for i in range(0, tiles, _AHEAD):
        tile = program * tiles + i
        sample, place, in_a = _tile_of(tile, across, samples, size, SAMPLES, SIZE)
        a = tl.load(start + sample * stride + place, mask=in_a, other=0.0)
        sample, place, in_b = _tile_of(tile + 1, across, samples, size, SAMPLES, SIZE)
        b = tl.load(start + sample * stride + place, mask=in_b, other=0.0)
        sample, place, in_c = _tile_of(tile + 2, across, samples, size, SAMPLES, SIZE)
        c = tl.load(start + sample * stride + place, mask=in_c, other=0.0)
        sample, place, in_d = _tile_of(tile + 3, across, samples, size, SAMPLES, SIZE)
        d = tl.load(start + sample * stride + place, mask=in_d, other=0.0)
        count, mean, spread = _merged(
            count,
            mean,
            spread,
            a.to(ACC) - origin,
            b.to(ACC) - origin,
            c.to(ACC) - origin,
            d.to(ACC) - origin,
            in_a,
            in_b,
            in_c,
            in_d,
        )
    lanes: tl.constexpr = SAMPLES * SIZE
    total, middle, squares = _merged_along(
        tl.reshape(count, [lanes]), tl.reshape(mean, [lanes]), tl.reshape(spread, [lanes]), 0
    )
    out = parts_ptr + program * 3 * channels + channel
    tl.store(out, total)
    tl.store(out + channels, middle)
    tl.store(out + 2 * channels, squares)


@triton.jit
def finish_kernel(
    parts_ptr,
    x_ptr,
    mean_ptr,
    var_ptr,
    running_mean_ptr,
    running_var_ptr,
    tracked_ptr,
    programs,
    channels,
    channel_stride,
    count,
    momentum,
    MOVES: tl.constexpr,
    COUNTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """`parts [programs, 3, channels]` -> `mean [channels]`, `var [channels]` and updated running statistics.

    Args:
        x_ptr: the values. The first values of two neighbouring channels are `channel_stride` elements apart.
        running_mean_ptr, running_var_ptr: updated with `momentum` if `MOVES`. The running variance is unbiased.
        tracked_ptr: a counter of calls, which is incremented if `COUNTS`.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    program = tl.arange(0, PROGRAMS)
    inside = (program < programs)[:, None] & there[None, :]
    at = parts_ptr + (program * 3 * channels)[:, None] + channel[None, :]
    counts = tl.load(at, mask=inside, other=0.0)
    means = tl.load(at + channels, mask=inside, other=0.0)
    spreads = tl.load(at + 2 * channels, mask=inside, other=0.0)
    _total, middle, squares = _merged_along(counts, means, spreads, 0)
    origin = _origin(tl.load(x_ptr + channel.to(tl.int64) * channel_stride, mask=there, other=0.0), ACC)
    mean = origin + middle
    size = tl.cast(count, ACC)
    var = squares / size
    tl.store(mean_ptr + channel, mean, mask=there)
    tl.store(var_ptr + channel, var, mask=there)
    if MOVES:
        by = tl.cast(momentum, ACC)
        before = tl.load(running_mean_ptr + channel, mask=there, other=0.0)
        tl.store(running_mean_ptr + channel, before * (1.0 - by) + mean * by, mask=there)
        before = tl.load(running_var_ptr + channel, mask=there, other=0.0)
        unbiased = squares / tl.cast(count - 1, ACC)
        tl.store(running_var_ptr + channel, before * (1.0 - by) + unbiased * by, mask=there)
    if COUNTS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
