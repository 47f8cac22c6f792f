"""Matrix products with spikes on tensor cores. Float32 values are split into bfloat16 parts.

A bfloat16 represents a spike exactly, so `s W^T` needs one product for each part of `W`, and no operand is rounded.
Tensor cores truncate their sums. If `LEAVES`, only sums of `CHUNK` terms are computed in tensor cores, and these sums
are added in float32.

Rows of a matrix have `units * UNIT` elements, where the constant `UNIT` is the number of elements that one load can
read. Rows of parts of weights are padded with zeros to complete chunks. Spikes and parts of gradients have the layout
in which neurons write them, or are padded, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._exchange import dot, in_registers

# The length of a row of parts is padded to a multiple of this number, which is a multiple of all chunks.
PADDING = 64
_PADDING = tl.constexpr(PADDING)


@triton.jit
def _part(x):
    """The bfloat16 that is nearest to `x`, or, if this bfloat16 is infinite, `x` rounded towards zero."""
    near = x.to(tl.bfloat16)
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(near.to(tl.float32)) == float("inf"), cut.to(tl.bfloat16), near)


@triton.jit
def _rest(x, part):
    taken = part.to(tl.float32)
    return tl.where(taken == x, 0.0, x - taken)


@triton.jit
def split_kernel(
    x_ptr,
    parts_ptr,
    rows,
    units,
    x_units,
    padded,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`x [rows, units * UNIT]` float32 -> `parts [PARTS, rows, padded * _PADDING]` bfloat16, whose sum is `x`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stored = (row < rows)[:, None] & (column < padded * _PADDING)[None, :]
    loaded = (row < rows)[:, None] & (column < units * UNIT)[None, :]
    row = row.to(tl.int64)[:, None]
    left = tl.load(x_ptr + row * (x_units * UNIT) + column[None, :], mask=loaded, other=0.0)
    at = parts_ptr + row * (padded * _PADDING) + column[None, :]
    plane = tl.cast(rows, tl.int64) * padded * _PADDING
    for p in tl.static_range(PARTS):
        part = _part(left)
        tl.store(at + p * plane, part, mask=stored)
        left = _rest(left, part)


# Adding and then subtracting this number rounds numbers below 2 ** 22 to integers.
_ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _float(bits):
    """A float32 from its bits, because kernels are launched with integers only."""
    return tl.cast(bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def narrow_kernel(
    s_ptr,
    spikes_ptr,
    seen_ptr,
    M,
    units,
    s_units,
    padded,
    scale_bits,
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`s [M, units * UNIT]` float32 -> `spikes [M, padded * _PADDING]` bfloat16. If `SCALED`, spikes are `s / scale`.

    `seen [cdiv(M, ROWS) + 2]` is not 0 for each group of `ROWS` rows in which an element of `spikes`, multiplied by the
    scale if `SCALED`, differs from the element of `s`. The last two elements of `seen` are 0.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    here = (row < M)[:, None]
    at = row.to(tl.int64)[:, None]
    seen = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(0, padded * _PADDING, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        s = tl.load(s_ptr + at * (s_units * UNIT) + column, mask=here & (column < units * UNIT), other=0.0)
        if SCALED:
            scale = _float(scale_bits)
            whole = (s / scale + _ROUND) - _ROUND
            seen = seen | (whole * scale != s).to(tl.int32)
            s = whole
        seen = seen | (s.to(tl.int32, bitcast=True) & 65535)
        stored = here & (column < padded * _PADDING)
        tl.store(spikes_ptr + at * (padded * _PADDING) + column, s.to(tl.bfloat16), mask=stored)
    tl.store(seen_ptr + program, tl.max(tl.max(seen, 1), 0))
    if program == 0:
        tl.store(seen_ptr + tl.cdiv(M, ROWS) + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def _tile(rows, columns, GROUP: tl.constexpr):
    """The row and the column of a program's tile. Programs that run at the same time share rows and columns."""
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % size, inside // size


@triton.jit
def _load(at, here, MASKED: tl.constexpr):
    """Loads a chunk. If a row can end within the chunk, elements beyond its end are 0."""
    if MASKED:
        return tl.load(at, mask=here, other=0.0)
    return tl.load(at)


@triton.jit
def outputs_kernel(
    s_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    s_units,
    padded,
    scale_bits,
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    LEAVES: tl.constexpr,
    HELD: tl.constexpr,
):
    """`y [M, N] = scale s W^T + b`, from `s [M, s_units * UNIT]` and `w [PARTS, N, padded * _PADDING]`."""
    pm, pn = _tile(tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    k = tl.arange(0, CHUNK)
    columns = padded * _PADDING
    s_columns = s_units * UNIT
    s_at = s_ptr + (m % M).to(tl.int64)[:, None] * s_columns + k[None, :]
    w_at = w_ptr + (n % N).to(tl.int64)[:, None] * columns + k[None, :]
    plane = tl.cast(N, tl.int64) * columns
    total = tl.zeros([BM, BN], tl.float32)
    for j in range(columns // CHUNK):
        s = _load(s_at, (k < s_columns - j * CHUNK)[None, :], UNIT < CHUNK)
        if HELD:
            s = in_registers(s)
        part = tl.zeros([BM, BN], tl.float32) if LEAVES else total
        for p in tl.static_range(PARTS):  # the smallest part first
            part = dot(s, tl.trans(tl.load(w_at + (PARTS - 1 - p) * plane)), part)
        total = total + part if LEAVES else part
        s_at += CHUNK
        w_at += CHUNK
    if SCALED:
        total *= _float(scale_bits)
    if BIAS:
        total += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _over_rows(g, s, total, HELD: tl.constexpr):
    """`total + g^T s`. If `HELD`, `s` and the result are transposed."""
    return dot(s, g, total) if HELD else dot(tl.trans(g), s, total)


@triton.jit
def weights_kernel(
    g0_ptr,
    g1_ptr,
    g2_ptr,
    s_ptr,
    out_ptr,
    M,
    N,
    K,
    g_units,
    s_units,
    G_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    """`out [shares, N, K]`, whose sum over shares is `g^T s`.

    Each part of g is `[M, g_units * G_UNIT]`, and s is `[M, s_units * S_UNIT]`. Pointers to parts beyond `PARTS` are
    not used.
    """
    tiles = tl.cdiv(K, BK)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    share = tl.program_id(1)
    chunks = tl.cdiv(tl.cdiv(M, CHUNK), tl.num_programs(1))
    g_columns = g_units * G_UNIT
    s_columns = s_units * S_UNIT
    # If `HELD`, the transposed result is computed, because its first factor is then the same for all parts.
    total = tl.zeros([BK, BN] if HELD else [BN, BK], tl.float32)
    for j in range(chunks):
        m = (share * chunks + j) * CHUNK + tl.arange(0, CHUNK)
        inside = (m < M)[:, None]
        row = m.to(tl.int64)[:, None]
        s = tl.load(s_ptr + row * s_columns + k[None, :], mask=inside & (k < s_columns)[None, :], other=0.0)
        if HELD:
            s = in_registers(tl.trans(s))
        g_at = row * g_columns + n[None, :]
        here = inside & (n < g_columns)[None, :]
        part = tl.zeros([BK, BN] if HELD else [BN, BK], tl.float32)
        if PARTS > 2:
            part = _over_rows(tl.load(g2_ptr + g_at, mask=here, other=0.0), s, part, HELD)
        if PARTS > 1:
            part = _over_rows(tl.load(g1_ptr + g_at, mask=here, other=0.0), s, part, HELD)
        total += _over_rows(tl.load(g0_ptr + g_at, mask=here, other=0.0), s, part, HELD)
    if HELD:
        total = tl.trans(total)
    at = out_ptr + share * (tl.cast(N, tl.int64) * K) + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, total, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def inputs_kernel(
    g0_ptr,
    g1_ptr,
    g2_ptr,
    w_ptr,
    out_ptr,
    M,
    N,
    K,
    g_units,
    w_padded,
    G_UNIT: tl.constexpr,
    G_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    LEAVES: tl.constexpr,
    HELD: tl.constexpr,
):
    """`out [M, K] = g W`, where g and W are in parts, numbered from 0.

    A product of two parts is computed if the sum of their numbers is less than the larger number of parts. Each part of
    g is `[M, g_units * G_UNIT]`. Pointers to parts beyond `G_PARTS` are not used.
    """
    pm, pk = _tile(tl.cdiv(M, BM), tl.cdiv(K, BK), GROUP)
    m = pm * BM + tl.arange(0, BM)
    k = pk * BK + tl.arange(0, BK)
    n = tl.arange(0, CHUNK)
    g_columns = g_units * G_UNIT
    w_columns = w_padded * _PADDING
    g_at = (m % M).to(tl.int64)[:, None] * g_columns + n[None, :]
    w_at = w_ptr + n.to(tl.int64)[:, None] * w_columns + k[None, :]
    w_plane = tl.cast(N, tl.int64) * w_columns
    here = (k < w_columns)[None, :]
    total = tl.zeros([BM, BK], tl.float32)
    for j in range(tl.cdiv(N, CHUNK)):
        inside = (n < N - j * CHUNK)[:, None] & here
        part = tl.zeros([BM, BK], tl.float32) if LEAVES else total
        held = (n < g_columns - j * CHUNK)[None, :]
        g0 = _load(g0_ptr + g_at, held, G_UNIT < CHUNK)
        if HELD:
            g0 = in_registers(g0)
        w0 = tl.load(w_at, mask=inside, other=0.0)
        if G_PARTS > 2:
            g2 = _load(g2_ptr + g_at, held, G_UNIT < CHUNK)
            part = dot(g2, w0, part)
        if W_PARTS > 2:
            w2 = tl.load(w_at + 2 * w_plane, mask=inside, other=0.0)
            part = dot(g0, w2, part)
        if G_PARTS > 1:
            g1 = _load(g1_ptr + g_at, held, G_UNIT < CHUNK)
            if HELD and W_PARTS > 1:
                g1 = in_registers(g1)
            if W_PARTS > 1:
                w1 = tl.load(w_at + w_plane, mask=inside, other=0.0)
                if G_PARTS > 2 or W_PARTS > 2:
                    part = dot(g1, w1, part)
                part = dot(g1, w0, part)
                part = dot(g0, w1, part)
            else:
                part = dot(g1, w0, part)
        elif W_PARTS > 1:
            part = dot(g0, tl.load(w_at + w_plane, mask=inside, other=0.0), part)
        part = dot(g0, w0, part)
        total = total + part if LEAVES else part
        g_at += CHUNK
        w_at += CHUNK * w_columns
    tl.store(out_ptr + m.to(tl.int64)[:, None] * K + k[None, :], total, mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def _any(seen_ptr, count, SEEN: tl.constexpr):
    """True if any of `count` elements is not 0."""
    found = tl.zeros([SEEN], tl.int32)
    for first in range(0, count, SEEN):
        at = first + tl.arange(0, SEEN)
        found = tl.maximum(found, tl.load(seen_ptr + at, mask=at < count, other=0))
    return tl.max(found, 0) != 0


@triton.jit
def repair_outputs_kernel(
    s_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    seen_ptr,
    M,
    N,
    K,
    s_row,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SEEN: tl.constexpr,
):
    """Recomputes `y = s W^T + b` in float32 for each group of `BM` rows for which `seen` is not 0."""
    columns = tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    # Nearly always, no such group exists. This check of all groups together is faster than a check in each tile.
    if _any(seen_ptr, tl.cdiv(M, BM), SEEN):
        for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
            if tl.load(seen_ptr + tile // columns) != 0:
                m = tile // columns * BM + tl.arange(0, BM)
                n = tile % columns * BN + tl.arange(0, BN)
                s_at = s_ptr + m.to(tl.int64)[:, None] * s_row + k[None, :]
                w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
                total = tl.zeros([BM, BN], tl.float32)
                for j in range(tl.cdiv(K, BK)):
                    inside = k < K - j * BK
                    s = tl.load(s_at + j * BK, mask=(m < M)[:, None] & inside[None, :], other=0.0)
                    w = tl.load(w_at + j * BK, mask=(n < N)[None, :] & inside[:, None], other=0.0)
                    total = tl.dot(s, w, total, input_precision="ieee")
                if BIAS:
                    total += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
                stored = (m < M)[:, None] & (n < N)[None, :]
                tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, mask=stored)


@triton.jit
def repair_weights_kernel(
    g0_ptr,
    g1_ptr,
    g2_ptr,
    s_ptr,
    out_ptr,
    seen_ptr,
    M,
    N,
    K,
    g_row,
    s_row,
    count,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    SEEN: tl.constexpr,
):
    """Recomputes `out [N, K] = g^T s` in float32 if any of `count` elements of `seen` is not 0.

    g is the sum of its parts, which may have any dtype.
    """
    if _any(seen_ptr, count, SEEN):
        columns = tl.cdiv(K, BK)
        for tile in range(tl.program_id(0), tl.cdiv(N, BN) * columns, tl.num_programs(0)):
            n = tile // columns * BN + tl.arange(0, BN)
            k = tile % columns * BK + tl.arange(0, BK)
            total = tl.zeros([BN, BK], tl.float32)
            for j in range(tl.cdiv(M, BM)):
                m = j * BM + tl.arange(0, BM)
                row = m.to(tl.int64)
                g_at = row[None, :] * g_row + n[:, None]
                here = (m < M)[None, :] & (n < N)[:, None]
                g = tl.load(g0_ptr + g_at, mask=here, other=0.0).to(tl.float32)
                if PARTS > 1:
                    g += tl.load(g1_ptr + g_at, mask=here, other=0.0).to(tl.float32)
                if PARTS > 2:
                    g += tl.load(g2_ptr + g_at, mask=here, other=0.0).to(tl.float32)
                s_at = s_ptr + row[:, None] * s_row + k[None, :]
                s = tl.load(s_at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
                total = tl.dot(g, s, total, input_precision="ieee")
            stored = (n < N)[:, None] & (k < K)[None, :]
            tl.store(out_ptr + n.to(tl.int64)[:, None] * K + k[None, :], total, mask=stored)


@triton.jit
def shares_kernel(shares_ptr, out_ptr, count, shares, scale_bits, SCALED: tl.constexpr, SIZE: tl.constexpr):
    """`out [count]`, the sum of `shares [shares, count]` in order, multiplied by the scale if `SCALED`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = at < count
    total = tl.load(shares_ptr + at, mask=here, other=0.0)
    for j in range(1, shares):
        total += tl.load(shares_ptr + tl.cast(count, tl.int64) * j + at, mask=here, other=0.0)
    if SCALED:
        total *= _float(scale_bits)
    tl.store(out_ptr + at, total, mask=here)
