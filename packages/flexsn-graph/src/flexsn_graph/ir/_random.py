"""Random numbers as functions: Philox of a key and a counter, with the same bits in PyTorch and in kernels.

A number is determined by a key (64 bits), a stream (the index of a draw within a step), a time step, a row and a
column. Nothing is stored, and the order of computation does not matter. Two stages keep the work of each step small:

- Each element of the step has three words: the first three words that Philox 4x32-10 computes from the counter
  `(column, row, 0, 0)` under the key. Kernels compute these words once, before the loop over time.
- Each pair of time steps has two words: Philox 2x32-7 of the counter `(step // 2, stream)`, combined by XOR with the
  element's second and third word, under the element's first word. The two words give two uniform numbers, or two
  normal numbers (a cosine and a sine). An even step uses the first number, and an odd step uses the second number.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. (According to this
source, Philox 2x32 and 4x32 pass all tests if they have at least 7 rounds.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_graph.ir._ops import Op, OpFacts, library, register_facts

_MASK = 0xFFFFFFFF
_OF_ELEMENT = "Tensor key_low, Tensor key_high, Tensor row, Tensor column"
_OF_STEP = "Tensor first, Tensor second, Tensor third, Tensor step, *, int stream"
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: _Four, key: tuple[Tensor, Tensor]) -> _Four:
    """The four words of a counter after 10 rounds, as int64 from 0 to `2**32 - 1`."""
    a, b, c, d = counter
    low, high = key
    for i in range(10):
        # int64 wraps around: the lower 64 bits of a product are exact, and the mask removes the bits of the sign.
        of_a, of_c = a * 0xD2511F53, c * 0xCD9E8D57
        a = ((of_c >> 32) ^ b ^ (low + i * 0x9E3779B9)) & _MASK
        c = ((of_a >> 32) ^ d ^ (high + i * 0xBB67AE85)) & _MASK
        b, d = of_c & _MASK, of_a & _MASK
    return a, b, c, d


def philox_2x32(a: Tensor, b: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of a counter after 7 rounds, as int64 from 0 to `2**32 - 1`."""
    for i in range(7):
        product = a * 0xD256D193
        a, b = ((product >> 32) ^ b ^ (key + i * 0x9E3779B9)) & _MASK, product & _MASK
    return a, b


def words_of_elements(low: Tensor, high: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three words of each element, int32, in the shape that the arguments broadcast to.

    Args:
        low, high: the key, int32 each.
        row, column: the position of an element, int32 each.
    """
    low, high, row, column = torch.broadcast_tensors(*(t.long() & _MASK for t in (low, high, row, column)))
    zero = torch.zeros_like(row)
    first, second, third, _ = philox_4x32((column, row, zero, zero), (low, high))
    return _to_int32(first), _to_int32(second), _to_int32(third)


def _to_int32(word: Tensor) -> Tensor:
    return ((word ^ 0x80000000) - 0x80000000).int()


def words_of_steps(first: Tensor, second: Tensor, third: Tensor, step: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """The two words of a pair of steps, int64 from 0 to `2**32 - 1`, in the shape that the arguments broadcast to.

    Args:
        first, second, third: the results of `words_of_elements`.
        step: int32, not negative.
        stream: index of the draw.
    """
    first, second, third, step = torch.broadcast_tensors(*(t.long() & _MASK for t in (first, second, third, step)))
    return philox_2x32((step >> 1) ^ second, third ^ stream, first)


def uniform(first: Tensor, second: Tensor, third: Tensor, step: Tensor, *, stream: int, bits: int) -> Tensor:
    """Multiples of `2**-bits` in [0, 1), float32. For the other arguments, see `words_of_steps`."""
    a, b = words_of_steps(first, second, third, step, stream)
    return (torch.where(step & 1 == 0, a, b) >> (32 - bits)).float() * 2.0**-bits


def normal(first: Tensor, second: Tensor, third: Tensor, step: Tensor, *, stream: int) -> Tensor:
    """Numbers of mean 0 and variance 1, float32, from a cosine or a sine. For the arguments, see `words_of_steps`.

    Each operation is rounded separately, and the order of operations is the same in each language, so that the bits are
    equal.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
    """
    a, b = words_of_steps(first, second, third, step, stream)
    radius = _compute_radius((a >> 1) | 1)
    # cos(2 pi x) is sin(2 pi (1 / 4 - |x|)), for x from -1/2 to 1/2. sin(2 pi x) is cos(2 pi (x - 1 / 4)).
    turn = _to_int32((b - ((step.long() & 1) << 30)) & _MASK).float() * 2.0**-32
    angle = 0.25 - turn.abs()
    square = angle * angle
    sine = ((SINE[0] * square + SINE[1]) * square + SINE[2]) * square + SINE[3]
    return radius * (sine * angle)


SINE = (-70.9934310913086, 81.34076690673828, -41.33714294433594, 6.283164024353027)
"""Coefficients of sin(2 pi x) / x, from x**6 down, for x from 0 to 1/4. The sine's relative error is below 6e-7."""

LOGARITHM = (
    0.2858414053916931,
    -0.4411187171936035,
    0.508065402507782,
    -0.6651604771614075,
    0.9998043775558472,
    -2.000009059906006,
)
"""Coefficients of -2 log(1 + x) / x, from x**5 down, for 1 + x from sqrt(1/2) to sqrt(2). The error is below 7e-6."""


def _compute_radius(word: Tensor) -> Tensor:
    """`sqrt(-2 log(word / 2**31))`, with an error below 7e-6.

    The function avoids a square root, because a square root adds a branch on a GPU.
    """
    x = word.float()
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # the exponent of x / sqrt(1 / 2)
    x = (bits - (exponent << 23)).view(torch.float32) - 1.0
    value = torch.full_like(x, LOGARITHM[0])
    for coefficient in LOGARITHM[1:]:
        value = value * x + coefficient
    square = value * x + (31 - exponent).float() * 1.3862943649291992
    half = square * 0.5
    inverse = (0x5F3759DF - (square.view(torch.int32) >> 1)).view(torch.float32)
    # Newton's method. The second constant compensates for half of the error, which is negative.
    for sum_of_both in (1.5, 1.500002384185791):
        inverse = inverse * (sum_of_both - half * inverse * inverse)
    return square * inverse


def _compute_word(low: Tensor, high: Tensor, row: Tensor, column: Tensor, *, index: int) -> Tensor:
    return words_of_elements(low, high, row, column)[index]


def _fake_number(*tensors: Tensor, dtype: torch.dtype = torch.float32, **_: int) -> Tensor:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tensors[0].new_empty(shape, dtype=dtype)


def _fake_word(*tensors: Tensor, index: int) -> Tensor:
    return _fake_number(*tensors, dtype=torch.int32)


for _definition in (
    f"element_word({_OF_ELEMENT}, *, int index) -> Tensor",
    f"uniform_number({_OF_STEP}, int bits) -> Tensor",
    f"normal_number({_OF_STEP}) -> Tensor",
):
    library.define(_definition, tags=torch.Tag.pointwise)
for _name, _function in {"element_word": _compute_word, "uniform_number": uniform, "normal_number": normal}.items():
    library.impl(_name, _function, "CompositeExplicitAutograd")
    _fake = _fake_word if _name == "element_word" else _fake_number
    torch.library.register_fake(f"flexsn_graph::{_name}", _fake, lib=library)

ELEMENT_WORD: Op = torch.ops.flexsn_graph.element_word.default
UNIFORM_NUMBER: Op = torch.ops.flexsn_graph.uniform_number.default
NORMAL_NUMBER: Op = torch.ops.flexsn_graph.normal_number.default

register_facts(ELEMENT_WORD, OpFacts(exact=True))
register_facts(UNIFORM_NUMBER, OpFacts(exact=True))
register_facts(NORMAL_NUMBER, OpFacts(exact=True))
