"""Random numbers as functions: Philox 4x32-10 of a key and a counter, the same bits in PyTorch and in kernels.

A number belongs to a key (64 bits), a stream (a number for each draw of a step), a step in time, a row and a column.
Its counter is `(column // 4, row, step, stream)`; the column's remainder picks one of the four words that Philox makes
of it. Nothing is stored, and nothing depends on the order in which numbers are computed.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_graph.ir._ops import Op, OpFacts, library, register_facts

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

_MASK = 0xFFFFFFFF
_ARGUMENTS = "Tensor key_low, Tensor key_high, Tensor step, Tensor row, Tensor column, *, int stream"


def words(low: Tensor, high: Tensor, step: Tensor, row: Tensor, column: Tensor, stream: int) -> list[Tensor]:
    """The four words of a counter, int64 from 0 to `2**32 - 1`, in the shape that the arguments broadcast to.

    Args:
        low, high: the key, int32 each.
        step, row, column: int32 each.
        stream: the number of the draw.
    """
    low, high, step, row, column = torch.broadcast_tensors(low, high, step, row, column)
    # Of the two halves of a counter, the words that are multiplied, and the others. int64 wraps without loss: of
    # a product, the lower 64 bits are exact, and the mask removes what a shift leaves of the sign.
    factors = torch.stack([(column >> 2).long(), step.long()]) & _MASK
    others = torch.stack([row.long(), torch.full_like(row, stream, dtype=torch.int64)]) & _MASK
    keys = torch.stack([low.long(), high.long()]) & _MASK
    constant = [2, *[1] * step.dim()]
    multipliers = _int64(MULTIPLIERS, step).view(constant)
    increments = _int64(INCREMENTS, step).view(constant)
    for i in range(ROUNDS):
        products = factors * multipliers
        factors = ((products >> 32).flip(0) ^ others ^ (keys + i * increments)) & _MASK
        others = (products & _MASK).flip(0)
    return [factors[0], others[0], factors[1], others[1]]


def _int64(values: tuple[int, int], like: Tensor) -> Tensor:
    """Constants as a tensor, without a copy from the host, which a CUDA graph would not capture."""
    first, second = (torch.full((1,), value, dtype=torch.int64, device=like.device) for value in values)
    return torch.cat([first, second])


def uniform(
    low: Tensor, high: Tensor, step: Tensor, row: Tensor, column: Tensor, *, stream: int, bits: int
) -> Tensor:
    """Multiples of `2**-bits` in [0, 1), float32."""
    a, b, c, d = words(low, high, step, row, column, stream)
    word = torch.where(column & 2 == 0, torch.where(column & 1 == 0, a, b), torch.where(column & 1 == 0, c, d))
    return (word >> (32 - bits)).float() * 2.0**-bits


def normal(low: Tensor, high: Tensor, step: Tensor, row: Tensor, column: Tensor, *, stream: int) -> Tensor:
    """Numbers of mean 0 and variance 1, float32, from words in pairs, by a cosine or a sine.

    Each operation is rounded by itself, in the same order in each language, so that the bits are the same.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
    """
    a, b, c, d = words(low, high, step, row, column, stream)
    first = column & 2 == 0
    # In float64: of float32, libraries round some square roots to the second nearest number.
    radius = (-2.0 * _log(torch.where(first, a, c).float() * 2.0**-32 + 2.0**-33)).double().sqrt().float()
    turn = torch.where(first, b, d)
    quarter = ((turn + 2**29) >> 30) & 3
    angle = (turn - (((turn + 2**29) >> 30) << 30)).float() * ANGLE
    square = angle * angle
    sine = ((SINE[0] * square + SINE[1]) * square + SINE[2]) * square * angle + angle
    cosine = ((COSINE[0] * square + COSINE[1]) * square + COSINE[2]) * square * square - 0.5 * square + 1.0
    place = (quarter - (column & 1)) & 3  # sin(x) is cos(x - pi / 2)
    value = torch.where(place & 1 == 0, cosine, sine)
    return radius * torch.where((place == 1) | (place == 2), -value, value)


ANGLE = 1.4629180792671596e-09
"""2 pi / 2**32."""

# Minimax polynomials on [-pi / 4, pi / 4] and on [sqrt(1 / 2), sqrt(2)], of single precision: Moshier, "Methods and
# programs for mathematical functions", 1989.
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
LOGARITHM = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def _log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # of x / sqrt(1 / 2)
    x = (bits - (exponent << 23)).view(torch.float32) - 1.0
    power = exponent.float()
    square = x * x
    value = torch.full_like(x, LOGARITHM[0])
    for coefficient in LOGARITHM[1:]:
        value = value * x + coefficient
    return power * 0.693359375 + (x + (value * x * square + power * -2.12194440e-4 - 0.5 * square))


def _shape(low: Tensor, high: Tensor, step: Tensor, row: Tensor, column: Tensor, **_: int) -> Tensor:
    shape = torch.broadcast_shapes(low.shape, high.shape, step.shape, row.shape, column.shape)
    return row.new_empty(shape, dtype=torch.float32)


library.define(f"uniform_number({_ARGUMENTS}, int bits) -> Tensor")
library.define(f"normal_number({_ARGUMENTS}) -> Tensor")
for _name, _function in {"uniform_number": uniform, "normal_number": normal}.items():
    library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsn_graph::{_name}", _shape, lib=library)

UNIFORM_NUMBER: Op = torch.ops.flexsn_graph.uniform_number.default
NORMAL_NUMBER: Op = torch.ops.flexsn_graph.normal_number.default

register_facts(UNIFORM_NUMBER, OpFacts(exact=True))
register_facts(NORMAL_NUMBER, OpFacts(exact=True))
