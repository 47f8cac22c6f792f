"""Schedules of attributes of neurons and surrogates: kernels use the current values without new compilations."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from nn_equations import CASES, Case, assert_same, draw_input, draw_states, run_neuron

from flexsn_nn import LIF, neuron, surrogate
from flexsn_nn.neuron import Neuron
from flexsn_nn.surrogate import Surrogate

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

STEP = (2, 35)
FACTORS = (1.0, 1.0625, 0.96875)
CASE_BY_CLASS = list({type(case.make()): case for case in CASES}.values())
SURROGATES = [
    function
    for name in surrogate.__all__
    if isinstance(kind := getattr(surrogate, name), type) and issubclass(kind, Surrogate) and kind is not Surrogate
    for function in [kind()]
    if any(isinstance(getattr(function, f.name), float) for f in fields(function))
]


def read_scalars(layer: Neuron) -> dict[str, float]:
    return {name: value for name, value in vars(layer).items() if type(value) is float}


def list_kernels(layer: Neuron, direction: str) -> set[str]:
    names = {kernel.function.__name__ for kernel in layer._get_program()._kernels.values()}
    return {name for name in names if f"_{direction}_" in name}


@pytest.mark.long(all_but=["clif"])
@pytest.mark.parametrize("case", CASE_BY_CLASS, ids=[case.name for case in CASE_BY_CLASS])
def test_kernels_use_changed_attributes_of_a_neuron(case: Case) -> None:
    layer = case.make(backend="triton")
    loop = copy.deepcopy(layer)
    loop.backend = "torch"
    scalars = read_scalars(layer)
    x, states = draw_input(case, 3, STEP), draw_states(case, STEP)
    for factor in FACTORS if scalars else ():
        for name, value in scalars.items():
            setattr(layer, name, value * factor)
            setattr(loop, name, value * factor)
        assert_same(run_neuron(layer, x, states), run_neuron(loop, x, states))
    if scalars:
        assert len(list_kernels(layer, "forward")) <= 2
        assert len(list_kernels(layer, "backward")) <= 2


@pytest.mark.long(all_but=["ATan"])
@pytest.mark.parametrize("function", SURROGATES, ids=[type(function).__name__ for function in SURROGATES])
def test_kernels_use_the_width_of_an_assigned_surrogate(function: Surrogate) -> None:
    """Assigns surrogates of one class that have different widths."""
    compiled, loop = LIF(backend="triton"), LIF(backend="torch")
    x = torch.linspace(-1.0, 4.0, 3 * 70).reshape(3, *STEP)
    widths: dict[str, Any] = {f.name: w for f in fields(function) if isinstance(w := getattr(function, f.name), float)}
    for factor in FACTORS:
        scaled = replace(function, **{name: value * factor for name, value in widths.items()})
        gradients = []
        for lif in (compiled, loop):
            lif.surrogate_function = scaled
            lif.reset()
            leaf = x.clone().requires_grad_()
            lif(leaf).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    assert len(list_kernels(compiled, "forward")) <= 2
    assert len(list_kernels(compiled, "backward")) <= 2


def test_several_neurons_and_surrogates_have_such_attributes() -> None:
    classes = {type(case.make()) for case in CASE_BY_CLASS if read_scalars(case.make())}
    assert {neuron.LIF, neuron.AdEx, neuron.Izhikevich, neuron.QIF} <= classes
    assert len(SURROGATES) > 10
