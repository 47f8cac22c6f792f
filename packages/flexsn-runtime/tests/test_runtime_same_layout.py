"""`same_layout`, the fast comparison of repeated calls, detects all differences with any version of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexsn_runtime._torch_private import alike
from flexsn_runtime.operands._operands import layout_key, same_layout

SHAPE = (4, 8)


def make_arguments(x: Tensor) -> list[Tensor | None]:
    """Returns the arguments of a scan: an input, a state that is zero, and a captured tensor."""
    return [x, None, torch.ones(8)]


OTHERS: dict[str, Callable[[], list[Tensor | None]]] = {
    "shape": lambda: make_arguments(torch.rand(4, 9)),
    "dimensions": lambda: make_arguments(torch.rand(1, 4, 8)),
    "strides": lambda: make_arguments(torch.rand(8, 4).t()),
    "dtype": lambda: make_arguments(torch.rand(SHAPE).half()),
    "device": lambda: make_arguments(torch.empty(SHAPE, device="meta")),
    "gradient": lambda: make_arguments(torch.rand(SHAPE, requires_grad=True)),
    "type": lambda: make_arguments(nn.Parameter(torch.rand(SHAPE), requires_grad=False)),
    "a subclass": lambda: make_arguments(torch.rand(SHAPE).as_subclass(Own)),
    "sign": lambda: make_arguments(torch._neg_view(torch.rand(SHAPE))),
    "alignment": lambda: make_arguments(torch.rand(33)[1:].view(SHAPE)),
    "no memory": lambda: make_arguments(freed()),
    "the captured tensor": lambda: [torch.rand(SHAPE), None, torch.ones(9)],
    "a state": lambda: [torch.rand(SHAPE), torch.rand(8), torch.ones(8)],
    "the absent tensor": lambda: [torch.rand(SHAPE), torch.ones(8), None],
    "too few": lambda: [torch.rand(SHAPE), None],
}


class Own(Tensor):
    """A subclass of tensors."""


class Mode(TorchDispatchMode):
    """A dispatch mode."""


def freed() -> Tensor:
    tensor = torch.rand(SHAPE)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_tensors_with_equal_layouts_are_accepted() -> None:
    assert alike([torch.rand(SHAPE)])(torch.rand(SHAPE)), "this version of torch has the fast comparison"
    is_same = same_layout(make_arguments(torch.rand(SHAPE)))
    for _ in range(3):
        assert is_same(make_arguments(torch.rand(SHAPE)))
    with torch.no_grad():
        assert is_same(make_arguments(torch.rand(SHAPE)))


@pytest.mark.parametrize("other", OTHERS)
def test_other_layouts_are_detected(other: str) -> None:
    first, others = make_arguments(torch.rand(SHAPE)), OTHERS[other]()
    assert not same_layout(first)(others)
    if other != "device":
        assert not same_layout(others)(first)
    if other != "gradient":
        assert layout_key(first) != layout_key(others)


def test_other_states_of_the_dispatcher_are_detected() -> None:
    tensors = make_arguments(torch.rand(SHAPE))
    is_same = same_layout(tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_same(tensors)
    with torch.inference_mode():
        assert not is_same(tensors)
    with Mode():  # type: ignore[no-untyped-call]
        assert not is_same(tensors)
    comparisons: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        comparisons.append(is_same(tensors))
        return x.sum()

    torch.func.grad(inside)(torch.rand(SHAPE))
    torch.vmap(inside)(torch.rand(SHAPE))
    assert comparisons == [False, False]
    assert is_same(tensors)


def test_predicate_keeps_no_tensor_alive() -> None:
    tensors = make_arguments(torch.rand(SHAPE))
    alive = weakref.ref(tensors[0])
    is_same = same_layout(tensors)
    del tensors
    assert alive() is None
    assert is_same(make_arguments(torch.rand(SHAPE)))
