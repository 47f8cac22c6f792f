"""The memory order of a scan's results equals the order that PyTorch's elementwise operations choose."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flexsn_hop.formats import dense_strides, sequence_order
from flexsn_runtime.operands._order import ScanFormat, strides_like

SIZES = (1, 2, 3, 5)


def select_strides(tensor: Tensor) -> list[int | None]:
    """Returns the strides of dimensions of more than one element."""
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


@pytest.mark.parametrize("dims", [1, 3, 6])
def test_gradient_has_the_format_of_its_argument(dims: int) -> None:
    draw = random.Random(dims)
    for _ in range(50):
        x = draw_layout([draw.choice(SIZES) for _ in range(dims)], draw)
        assert select_strides(torch.empty_strided(x.shape, strides_like(x))) == select_strides(x * 2.0)


@pytest.mark.parametrize("steps", [1, 4])
def test_results_of_a_scan_have_the_format_of_torch(steps: int) -> None:
    draw = random.Random(steps)
    for _ in range(200):
        shape = [draw.choice(SIZES) for _ in range(draw.randint(1, 4))]
        x, y = (draw_layout([steps, *shape], draw).expand(steps, *[-1] * len(shape)) for _ in range(2))
        step = tuple(torch.broadcast_shapes(x.shape[1:], y.shape[1:]))
        v = draw_layout(step, draw).expand(step)
        scan_format = ScanFormat.of(step, [x, y], [v])
        result = torch.addcmul(x, y, v.expand(steps, *step))
        assert select_strides(torch.empty_strided(result.shape, scan_format.sequence)) == select_strides(result)
        single_step = torch.addcmul(x[0], y[0], v)
        assert select_strides(torch.empty_strided(single_step.shape, scan_format.step)) == select_strides(single_step)
        # Elements are counted in a state's memory order.
        assert scan_format.order.shape(scan_format.step) == dense_strides(
            scan_format.order.shape(step), range(len(step))
        )


def test_memory_order_of_inputs_is_kept() -> None:
    frames = torch.empty(6, 3, 4, 5).to(memory_format=torch.channels_last).unflatten(0, (2, 3))
    assert ScanFormat.of(frames.shape[1:], [frames], [None]).sequence == frames.stride()
    assert ScanFormat.of(frames.shape[1:], [frames], [None]).order.dims == (0, 2, 3, 1)
    batch_first = torch.empty(3, 8, 5).transpose(0, 1)
    scan_format = ScanFormat.of((3, 5), [batch_first], [None])
    assert scan_format.sequence == batch_first.stride() == (5, 40, 1)
    assert scan_format.step == (5, 1)
    still = torch.empty(3, 4, 5).permute(0, 2, 1).expand(7, 3, 5, 4)
    assert ScanFormat.of((3, 5, 4), [still], [None]).sequence == (60, 20, 1, 5)
    spread = torch.empty(7, 1, 1).expand(7, 3, 5)
    assert ScanFormat.of((3, 5), [spread], [torch.empty(5, 3).t()]).sequence == (15, 1, 3)


def test_states_determine_the_format_if_all_inputs_broadcast() -> None:
    """Checks that states determine the format, as in the loop, also for steps with matrix products."""
    x, v = torch.empty(7, 3, 8), torch.empty(5, 3).t()
    assert ScanFormat.of((3, 5), [x], [v]).sequence == (15, 1, 3)
    assert sequence_order((3, 5), [x], [v]) == (0, 2, 1)
