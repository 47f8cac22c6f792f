"""`neuron.step(inputs, states)`: results equal a call of the module, but the module stores no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import LIF, QIF, FlexSN, GatedLIF, InputCountError, InputDtypeError, StateError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
backends = pytest.mark.parametrize("backend", ["torch", "hop", "triton", "auto"])
STEP = (3, 35)


def exchange(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return a + x, b * y, 0.5 * b + x, a - 0.25 * y


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@backends
def test_step_equals_forward_and_stores_no_state(backend: str) -> None:
    storing, passing = (FlexSN(exchange, 2, 2, 2, backend=backend, store_state_seqs=True) for _ in range(2))
    x, y = draw(4, *STEP), draw(4, *STEP, seed=1)
    states = None
    for _ in range(2):
        outputs, states = passing.step((x, y), states)
        expected = storing(x, y)
        assert isinstance(outputs, list)
        for result, expected_result in zip([*outputs, *states], [*expected, *storing.states], strict=True):
            assert torch.equal(result, expected_result)
    assert passing.states == []
    assert passing.state_seqs == []
    # A step neither reads nor writes the states that the module stores.
    passing.states = [draw(*STEP, seed=2), draw(*STEP, seed=3)]
    copies = [state.clone() for state in passing.states]
    outputs_of_third_call, _ = passing.step((x, y))
    storing.reset()
    for result, expected_result in zip(
        [*outputs_of_third_call, *passing.states], [*storing(x, y), *copies], strict=True
    ):
        assert torch.equal(result, expected_result)


@backends
def test_step_does_not_change_passed_states(backend: str) -> None:
    neuron = LIF(backend=backend)
    arguments = [draw(*STEP)]
    copied = arguments[0].clone()
    output, states = neuron.step(draw(3, *STEP), arguments)
    assert isinstance(output, Tensor)
    assert torch.equal(arguments[0], copied)
    assert states[0] is not arguments[0]


@backends
def test_gradients_flow_through_the_states(backend: str) -> None:
    """Checks that the gradient of the second call's output reaches the input and the states of the first call."""
    neuron = FlexSN(exchange, 2, 2, 2, backend=backend)
    x, y = draw(6, *STEP).requires_grad_(), draw(6, *STEP, seed=1).requires_grad_()
    start = [draw(*STEP, seed=2).requires_grad_(), draw(*STEP, seed=3).requires_grad_()]
    leaves = [x, y, *start]
    _, middle = neuron.step((x[:4], y[:4]), start)
    outputs, _ = neuron.step((x[4:], y[4:]), middle)
    expected_outputs, _ = FlexSN(exchange, 2, 2, 2, backend="torch").step((x, y), start)
    gradients = torch.autograd.grad(outputs[0].square().sum(), leaves)
    expected = torch.autograd.grad(expected_outputs[0][4:].square().sum(), leaves)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert b[:4].any()


@pytest.mark.parametrize(
    "make", [LIF, QIF, pytest.param(lambda **o: GatedLIF(init_linear_decay=0.1, **o), marks=pytest.mark.long)]
)
def test_single_steps_equal_a_sequence(make: Any) -> None:
    neuron = make(step_mode="s").to(DEVICE)
    x = draw(5, *STEP) + 0.5
    states, outputs = None, []
    for step in x:
        output, states = neuron.step(step, states)
        outputs.append(output)
    neuron.step_mode = "m"
    expected, final = neuron.step(x)
    assert torch.equal(torch.stack(outputs), expected)
    assert states is not None
    assert all(torch.equal(a, b) for a, b in zip(states, final, strict=True))


@backends
def test_wrong_arguments_are_refused(backend: str) -> None:
    neuron, x = LIF(backend=backend), draw(4, 3, 5)
    _, states = neuron.step(x)
    with pytest.raises(StateError, match=r"state 0 has shape \[3, 5\].*\[2, 5\].*Call reset\(\).*matching states"):
        neuron.step(x[:, :2], states)
    with pytest.raises(StateError, match="there are 2 states; num_states is 1"):
        neuron.step(x, [*states, *states])
    with pytest.raises(InputCountError, match="got 2 inputs; num_inputs is 1"):
        neuron.step((x, x))
    with pytest.raises(InputDtypeError, match="int64"):
        neuron.step(x.long())
    assert neuron.states == []
