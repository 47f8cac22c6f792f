"""Sequences without steps: empty outputs, unchanged states, and the gradients of the states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nn_equations import CASES, Case
from torch import Tensor

from flexsn_nn import LIF, RLIF, ExampleError, FlexSN
from flexsn_nn.layer import NormNeuron
from flexsn_nn.neuron import Neuron, SlidingPSN

STEP = (2, 35)
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "hop", "auto", "cpp"])


def make_empty_inputs(case: Case, neuron: FlexSN) -> list[Tensor]:
    step = torch.zeros(STEP, dtype=torch.float64)
    return [step.new_zeros(0, *STEP).requires_grad_() for _ in range(neuron.num_inputs)]


# Neurons with one and several states, learned parameters, random values, and recurrent weights.
IN_CPP = ("lif", "plif", "synaptic_zero", "stochastic", "recurrent_gated_lif", "rleaky_none")


@pytest.mark.long(all_but=["torch-*", *(f"cpp-{name}" for name in IN_CPP)])
@EACH
@pytest.mark.parametrize("backend", ["torch", "hop", "cpp"])
def test_every_neuron_keeps_its_states_without_steps(case: Case, backend: str) -> None:
    neuron: Any = case.make(backend=backend).double()
    if getattr(neuron, "T", None) is not None:
        pytest.skip("a neuron for a fixed number of steps")
    inputs = make_empty_inputs(case, neuron)
    states = [torch.rand(STEP, dtype=torch.float64).requires_grad_() for _ in range(neuron.num_states)]
    output, final = neuron.step(inputs, states)
    assert output.shape == (0, *STEP)
    assert output.dtype == torch.float64
    for initial, state in zip(states, final, strict=True):
        assert torch.equal(state, initial)
        assert state is not initial
    gradients = torch.autograd.grad(sum(2 * state.sum() for state in final), states)
    assert all(torch.equal(gradient, torch.full_like(gradient, 2)) for gradient in gradients)
    neuron.store_state_seqs = neuron.count_spikes = True
    neuron(*inputs)
    assert [tuple(sequence.shape) for sequence in neuron.state_seqs] == [(0, *STEP)] * neuron.num_states
    assert [tuple(state.shape) for state in neuron.states] == [STEP] * neuron.num_states
    assert neuron.spike_counts.sum() == 0


@pytest.mark.parametrize("precision", ["eager", "float32"])
@BACKENDS
def test_results_without_steps_have_the_usual_dtypes(backend: str, precision: str) -> None:
    neuron = LIF(backend=backend, precision=precision)
    output, (v,) = neuron.step(torch.zeros(0, 2, 5, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert v.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)


def test_a_compiled_step_without_steps_keeps_the_state() -> None:
    neuron = LIF()
    step = torch.compile(neuron.step, backend="aot_eager", fullgraph=True)
    v = torch.rand(2, 5, requires_grad=True)
    output, (final,) = step(torch.zeros(0, 2, 5), [v])
    assert output.shape == (0, 2, 5)
    assert torch.equal(final, v)
    assert torch.equal(torch.autograd.grad(final.sum(), v)[0], torch.ones(2, 5))


def test_a_part_without_steps_does_not_change_a_sequence() -> None:
    for layer in (LIF(), LIF(backend="torch"), SlidingPSN(3), NormNeuron(torch.nn.BatchNorm1d(5), LIF()).eval()):
        x = 2 * torch.rand(4, 2, 5)
        with torch.no_grad():
            expected = layer(x)
            (layer.neuron if isinstance(layer, NormNeuron) else layer).reset()
            parts = torch.cat([layer(part) for part in (x[:2], x[:0], x[2:])])
        torch.testing.assert_close(parts, expected)


@BACKENDS
def test_examples_replace_a_run_of_the_core(backend: str) -> None:
    calls = []

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(x)
        return x + v, v

    neuron = FlexSN(core, 1, 1, 1, backend=backend, example_outputs=(torch.zeros(2, 4),))
    output = neuron(torch.zeros(0, 2, 4))
    assert isinstance(output, Tensor)
    assert output.shape == (0, 2, 4)
    assert torch.equal(neuron.states[0], torch.zeros(2, 4))
    assert not calls


@BACKENDS
def test_a_step_without_outputs_needs_no_example(backend: str) -> None:
    neuron = FlexSN(lambda x, v: (x + v,), 1, 1, 0, backend=backend)
    v = torch.rand(2, 4, requires_grad=True)
    outputs, (final,) = neuron.step(torch.zeros(0, 2, 4), [v])
    assert outputs == []
    assert torch.equal(final, v)
    assert torch.equal(torch.autograd.grad(final.sum(), v)[0], torch.ones(2, 4))


class Wide(Neuron):
    """A user's neuron whose output has another dtype than its input."""

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x + v).double(), x + v


class Random(Neuron):
    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if x.sum() > 0:
            return x, v
        return x + v, v


def test_users_neurons_determine_the_dtype_or_are_refused() -> None:
    assert Wide(backend="torch")(torch.zeros(0, 2)).dtype == torch.float64
    with pytest.raises(ExampleError, match=r"no steps.*Random\.dynamics cannot be traced.*leave out sequences"):
        Random(backend="torch")(torch.zeros(0, 2))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("precision", ["eager", "float32"])
def test_wider_states_determine_the_dtype_for_zero_steps(backend: str, precision: str) -> None:
    dtypes = []
    for steps in (0, 3):
        neuron = LIF(backend=backend, precision=precision)
        neuron(torch.zeros(2, 2, 4))  # This call makes the state float32.
        dtypes.append(neuron(torch.zeros(steps, 2, 4, dtype=torch.bfloat16)).dtype)
    assert dtypes == [torch.bfloat16 if precision == "float32" else torch.float32] * 2


class Followed(torch.autograd.Function):
    """The identity. If autograd reaches it, its input has a gradient, even one of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@BACKENDS
@pytest.mark.parametrize("make", [LIF, partial(RLIF, 4, all_to_all=False, V=0.25)], ids=["pointwise", "a product"])
def test_graphs_of_no_steps_exclude_inputs_and_parameters(make: Callable[..., Neuron], backend: str) -> None:
    neuron = make(backend=backend)
    neuron.count_spikes = True
    for _ in range(2):  # The second call repeats the recorded operations of the first call.
        neuron.reset()
        earlier = torch.rand(3, 2, 4, requires_grad=True)
        neuron(earlier)
        x = torch.zeros(0, 2, 4, requires_grad=True)
        neuron(Followed.apply(x))
        assert neuron.spike_counts is not None
        loss = neuron.states[0].sum() + neuron.spike_counts.sum()
        gradients = torch.autograd.grad(loss, [x, earlier], allow_unused=True)
        assert gradients[0] is None
        assert gradients[1] is not None
