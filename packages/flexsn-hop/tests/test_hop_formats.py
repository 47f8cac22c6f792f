"""The memory order of results equals the order that PyTorch's elementwise operations choose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flexsn_hop.formats import dense_strides, memory_order, order_like

SIZES = (1, 2, 3, 5)


def select_strides(tensor: Tensor) -> list[int | None]:
    """Returns the strides of the dimensions with more than one element."""
    return [stride if size > 1 else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def draw_layout(shape: Sequence[int], draw: random.Random) -> Tensor:
    """Returns a tensor that broadcasts to `shape`, and may be permuted, sliced or expanded, or have sizes of 1."""
    dims = range(len(shape))
    sizes = [1 if draw.random() < 0.15 else size for size in shape]
    order = draw.sample(dims, len(shape))
    if draw.random() < 0.3:
        order = list(dims)
    holes = [draw.choice((1, 1, 1, 2)) if draw.random() < 0.4 else 1 for _ in dims]
    tensor = torch.empty([sizes[d] * holes[d] for d in order]).permute([order.index(d) for d in dims])
    tensor = tensor[tuple(slice(None, None, hole) for hole in holes)]
    if draw.random() < 0.3:
        tensor = tensor.expand(shape) if draw.random() < 0.5 else tensor.expand(shape[0], *sizes[1:])
    return tensor


def format_of(*tensors: Tensor) -> tuple[int, ...]:
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    order = memory_order(shape, [(t.shape, t.stride()) for t in tensors])
    return dense_strides(shape, order)


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5, 6])
def test_format_of_one_operand_equals_torchs(dims: int) -> None:
    draw = random.Random(dims)
    for _ in range(150):
        shape = [draw.choice(SIZES) for _ in range(dims)]
        x = draw_layout(shape, draw)
        like = torch.empty_strided(x.shape, format_of(x))
        assert select_strides(like) == select_strides(x * 2.0), (x.shape, x.stride())
        assert like.stride() == dense_strides(x.shape, order_like(x))


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5, 6])
def test_format_of_several_operands_equals_torchs(dims: int) -> None:
    draw = random.Random(10 + dims)
    for _ in range(200):
        shape = [draw.choice(SIZES) for _ in range(dims)]
        x, y, z = (draw_layout(shape, draw) for _ in range(3))
        for tensors, result in (((x, y), x + y), ((x, y, z), torch.addcmul(x, y, z))):
            like = torch.empty_strided(result.shape, format_of(*tensors))
            assert select_strides(like) == select_strides(result), [(t.shape, t.stride()) for t in tensors]


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last, torch.channels_last_3d], ids=str)
def test_named_formats_are_kept_with_all_their_strides(format_: torch.memory_format) -> None:
    dims = 5 if format_ is torch.channels_last_3d else 4
    for shape in itertools.product((1, 3), repeat=dims):
        x = torch.empty(shape).to(memory_format=format_)
        assert format_of(x) == x.neg().stride()
        assert format_of(x, x) == (x + x).stride()


def test_format_without_elements_equals_torchs() -> None:
    x = torch.empty(3, 4, 5).permute(2, 0, 1)[:0]
    assert format_of(x) == x.neg().stride()
