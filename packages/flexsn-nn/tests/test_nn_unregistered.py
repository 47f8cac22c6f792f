"""Captured parameters that no module registers are reported, while registered parameters are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn._unregistered import unregistered

GLOBAL = nn.Parameter(torch.tensor(0.5))
Core = Callable[..., Any]


def decay_and_add(decay: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v * decay + x
    return h, h


def capture_by_closure(w: nn.Parameter) -> Core:
    return lambda x, v: decay_and_add(w, x, v)


def capture_by_helper(w: nn.Parameter) -> Core:
    def decay(v: Tensor) -> Tensor:
        return v * w

    return lambda x, v: (decay(v) + x,) * 2


def capture_by_partial(w: nn.Parameter) -> Core:
    return partial(decay_and_add, w)


def capture_by_default(w: nn.Parameter) -> Core:
    def core(x: Tensor, v: Tensor, w: Tensor = w) -> tuple[Tensor, Tensor]:
        return decay_and_add(w, x, v)

    return core


class Decay:
    def __init__(self, w: nn.Parameter) -> None:
        self.w = w

    def __call__(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return decay_and_add(self.w, x, v)


def capture_by_method(w: nn.Parameter) -> Core:
    return Decay(w).__call__


def capture_by_global(w: nn.Parameter) -> Core:
    return lambda x, v: decay_and_add(GLOBAL, x, v)


def capture_by_list(w: nn.Parameter) -> Core:
    weights = [0.5, {"decay": (w,)}]
    return lambda x, v: decay_and_add(weights[1]["decay"][0], x, v)  # type: ignore[index]


MAKERS = {
    "w": capture_by_closure,
    "argument 0": capture_by_partial,
    "default 0": capture_by_default,
    "GLOBAL": capture_by_global,
}


@pytest.mark.long(all_but=["w-capture_by_helper-auto", "GLOBAL-capture_by_global-auto"])
@pytest.mark.parametrize("backend", ["torch", "hop", "auto"])
@pytest.mark.parametrize(
    ("name", "make"), [*MAKERS.items(), ("w", capture_by_helper), ("w", Decay), ("w", capture_by_method)]
)
def test_only_the_first_call_names_the_parameter(name: str, make: Callable[[nn.Parameter], Core], backend: str) -> None:
    neuron = FlexSN(make(nn.Parameter(torch.tensor(0.5))), 1, 1, 1, backend=backend)
    with pytest.warns(UserWarning, match=rf"no module and no optimizer: {name}\. .*register_parameter"):
        neuron(torch.ones(2, 3))
    assert neuron.explain().endswith(f"captured parameters that are in no module and no optimizer: {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuron(torch.ones(2, 3))


@pytest.mark.long(all_but=["capture_by_partial"])
@pytest.mark.parametrize("make", [capture_by_closure, capture_by_helper, capture_by_partial, capture_by_default, Decay])
def test_registered_parameters_cause_no_warning(make: Callable[[nn.Parameter], Core]) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = nn.Parameter(torch.tensor(0.5))
            self.neuron = FlexSN(make(w), 1, 1, 1)
            self.w = w

    parent = Parent()
    in_optimizer = nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.SGD([in_optimizer], lr=0.1)
    on_neuron = nn.Parameter(torch.tensor(0.5))
    neurons = [parent.neuron, FlexSN(make(in_optimizer), 1, 1, 1), FlexSN(make(on_neuron), 1, 1, 1)]
    neurons[-1].register_parameter("w", on_neuron)
    for neuron in neurons:
        neuron(torch.ones(2, 3))  # Warnings are errors in these tests.
        assert "captured" not in neuron.explain()
    assert optimizer.param_groups[0]["params"] == [in_optimizer]


def test_parameters_in_containers_are_found() -> None:
    neuron = FlexSN(capture_by_list(nn.Parameter(torch.tensor(0.5))), 1, 1, 1, backend="torch")
    with pytest.warns(UserWarning, match=r"no optimizer: weights\[1\]\['decay'\]\[0\]\. "):
        neuron(torch.ones(2, 3))
    endless: list[Any] = []
    endless.append(endless)
    assert unregistered(lambda: endless) == []


def test_parameters_of_two_modules_may_have_one_name() -> None:
    first, second = (capture_by_closure(nn.Parameter(torch.tensor(0.5))) for _ in range(2))
    assert unregistered(lambda x, v: (first(x, v), second(x, v))) == ["w", "w"]


def test_captured_tensors_that_are_not_parameters_cause_no_warning() -> None:
    w = torch.tensor(0.5, requires_grad=True)
    FlexSN(lambda x, v: decay_and_add(w, x, v), 1, 1, 1)(torch.ones(2, 3)).sum().backward()
    assert w.grad is not None
