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
ONE_OF_EACH = list({type(case.make()): case for case in CASES}.values())
SURROGATES = [
    made
    for name in surrogate.__all__
    if isinstance(kind := getattr(surrogate, name), type) and issubclass(kind, Surrogate) and kind is not Surrogate
    for made in [kind()]
    if any(isinstance(getattr(made, f.name), float) for f in fields(made))
]


def numbers_of(made: Neuron) -> dict[str, float]:
    return {name: value for name, value in vars(made).items() if type(value) is float}


def kernels_of(made: Neuron, direction: str) -> set[str]:
    names = {kernel.function.__name__ for kernel in made._get_program()._kernels.values()}
    return {name for name in names if f"_{direction}_" in name}


@pytest.mark.long(all_but=["clif"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=[case.name for case in ONE_OF_EACH])
def test_numbers_of_a_neuron(case: Case) -> None:
    made = case.make(backend="triton")
    loop = copy.deepcopy(made)
    loop.backend = "torch"
    numbers = numbers_of(made)
    x, states = draw_input(case, 3, STEP), draw_states(case, STEP)
    for factor in FACTORS if numbers else ():
        for name, value in numbers.items():
            setattr(made, name, value * factor)
            setattr(loop, name, value * factor)
        assert_same(run_neuron(made, x, states), run_neuron(loop, x, states))
    if numbers:
        assert len(kernels_of(made, "forward")) <= 2
        assert len(kernels_of(made, "backward")) <= 2


@pytest.mark.long(all_but=["ATan"])
@pytest.mark.parametrize("made", SURROGATES, ids=[type(made).__name__ for made in SURROGATES])
def test_width_of_a_surrogate(made: Surrogate) -> None:
    """Assigns surrogates of one class that have different widths."""
    compiled, loop = LIF(backend="triton"), LIF(backend="torch")
    x = torch.linspace(-1.0, 4.0, 3 * 70).reshape(3, *STEP)
    widths: dict[str, Any] = {f.name: w for f in fields(made) if isinstance(w := getattr(made, f.name), float)}
    for factor in FACTORS:
        scaled = replace(made, **{name: value * factor for name, value in widths.items()})
        found = []
        for lif in (compiled, loop):
            lif.surrogate_function = scaled
            lif.reset()
            leaf = x.clone().requires_grad_()
            lif(leaf).sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found)
    assert len(kernels_of(compiled, "forward")) <= 2
    assert len(kernels_of(compiled, "backward")) <= 2


def test_numbers_to_change_are_found() -> None:
    with_numbers = {type(case.make()) for case in ONE_OF_EACH if numbers_of(case.make())}
    assert {neuron.LIF, neuron.AdEx, neuron.Izhikevich, neuron.QIF} <= with_numbers
    assert len(SURROGATES) > 10
