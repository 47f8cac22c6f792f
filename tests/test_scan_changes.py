"""What a step function reads is changed between two calls: the compiled neuron is the loop before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import changing_cores
import pytest
import torch
from changing_cores import NUMBERS_ONLY, PLACES
from torch import Tensor

from flexsn_nn import FlexSN

T, STEP = 3, (2, 3)


def tensor(seed: int) -> Tensor:
    return torch.rand(STEP, generator=torch.Generator().manual_seed(seed))


def double(x: Tensor) -> Tensor:
    return x * 2.0


def shift(x: Tensor) -> Tensor:
    return x + 0.125


CHANGES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "number": lambda: (0.25, 0.75),
    "tensor": lambda: (tensor(1), tensor(2)),
    "number to tensor": lambda: (0.25, tensor(2)),
    "tensor to number": lambda: (tensor(1), 0.75),
    "function": lambda: (double, shift),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Global hooks and names are gone afterwards."""
    hooks = dict(torch.nn.modules.module._global_forward_hooks)
    yield
    torch.nn.modules.module._global_forward_hooks.clear()
    torch.nn.modules.module._global_forward_hooks.update(hooks)
    vars(changing_cores).pop("max", None)


def results(neuron: FlexSN, device: str) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, T * 6, device=device).reshape(T, *STEP).requires_grad_()
    neuron.reset()
    output = neuron(x)
    assert isinstance(output, Tensor)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    return output, gradient


def assert_alike(core: Any, compiled: FlexSN, device: str = "cpu") -> tuple[Tensor, Tensor]:
    expected = results(FlexSN(core, 1, 1, 1, backend="torch"), device)
    got = results(compiled, device)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return expected


def family() -> list[tuple[str, str]]:
    """A number in each place, and another kind of change, in turn."""
    others = [name for name in CHANGES if name != "number"]
    found = [(name, "number") for name in PLACES]
    anything = [name for name in PLACES if name not in NUMBERS_ONLY]
    return found + [(name, others[i % len(others)]) for i, name in enumerate(anything)]


# On a GPU, autograd has a thread of its own for these.
IN_BACKWARD = [name for name in PLACES if "backward" in name or "context_hides" in name or "autograd" in name]


def check_change(name: str, change: str, device: str) -> None:
    first, second = CHANGES[change]()
    core, assign = PLACES[name](first)
    compiled = FlexSN(core, 1, 1, 1, backend="triton")
    before = assert_alike(core, compiled, device)
    assign(second)
    after = assert_alike(core, compiled, device)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the change does nothing"


@pytest.mark.long(all_but=["*-number", "attribute_of_module-*", "closure_variable-*", "nested_dictionary-*"])
@pytest.mark.parametrize(("name", "change"), family())
def test_a_changed_value_is_seen(name: str, change: str, interpreted: None) -> None:
    check_change(name, change, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_a_value_that_a_backward_reads_is_seen_on_the_gpu(name: str) -> None:
    check_change(name, "number", "cuda")
