"""Resets within a sequence: the states return to their initial values, and gradients do not cross the reset."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from nn_equations import CASES, Case, draw_input
from torch import Tensor, nn

from flexsn_codegen import BackwardSpec, ForwardSpec
from flexsn_nn import LIF, FlexSN, OverTime, ParameterError, StochasticLIF, functional
from flexsn_nn.neuron import Feedback, Neuron
from flexsn_runtime.plans import _buckets
from flexsn_runtime.step import _pointwise_step

FEATURES, T, B = 35, 23, 3
# The steps at which each sequence is reset. Sequence 0 has no resets, and sequence 1 has one at the first step.
RESET_STEPS = {1: [0, 10], 2: [9, 18]}


def make_resets() -> Tensor:
    resets = torch.zeros(T, B, dtype=torch.bool)
    for b, steps in RESET_STEPS.items():
        resets[steps, b] = True
    return resets


def run(neuron: FlexSN, inputs: list[Tensor], **options: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the output, the gradient of the first input, and the final states."""
    neuron.reset()
    x = inputs[0].clone().requires_grad_()
    output = neuron(x, *inputs[1:], **options)
    assert isinstance(output, Tensor)
    weights = torch.arange(FEATURES, dtype=x.dtype).cos()
    loss = (output * weights).sum()
    for state in neuron.states:
        loss = loss + (state * weights).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    return output.detach(), gradient, [state.detach() for state in neuron.states]


def compare_with_parts(case: Case, backend: str) -> None:
    neuron = case.make(backend=backend)
    inputs = [draw_input(case, T, (B, FEATURES))]
    if isinstance(neuron, StochasticLIF):
        inputs.append(torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    output, gradient, states = run(neuron, inputs, resets=make_resets())
    exact = not isinstance(neuron, Feedback) and backend != "torch"
    for b in range(B):
        cuts = [0, *[step for step in RESET_STEPS.get(b, []) if step], T]
        for begin, end in pairwise(cuts):
            part, part_gradient, part_states = run_part(neuron, inputs, begin, end, last=end == T)
            assert torch.equal(output[begin:end, b], part[:, b])
            if exact:
                assert torch.equal(gradient[begin:end, b], part_gradient[:, b])
            else:
                torch.testing.assert_close(gradient[begin:end, b], part_gradient[:, b], rtol=1e-12, atol=1e-12)
        assert all(torch.equal(state[b], other[b]) for state, other in zip(states, part_states, strict=True))


def run_part(
    neuron: Neuron, inputs: list[Tensor], begin: int, end: int, *, last: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs steps `begin` to `end` separately. The final states contribute to the loss only in the last part."""
    neuron.reset()
    x = inputs[0][begin:end].clone().requires_grad_()
    output = neuron(x, *[other[begin:end] for other in inputs[1:]])
    weights = torch.arange(FEATURES, dtype=x.dtype).cos()
    loss = (output * weights).sum()
    for state in neuron.states if last else []:
        loss = loss + (state * weights).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    return output.detach(), gradient, [state.detach() for state in neuron.states]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_neuron_has_resets_in_the_loop(case: Case) -> None:
    compare_with_parts(case, "torch")


# The initial states of AdEx are not zero.
@pytest.mark.long(all_but=["adex"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_neuron_has_resets_in_cpp(case: Case) -> None:
    compare_with_parts(case, "auto")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "recurrent_gated_lif"], ids=lambda case: case.name)
def test_each_neuron_has_resets_in_triton(case: Case) -> None:
    compare_with_parts(case, "triton")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("lengths", [None, torch.tensor([T, 12, 9])])
@pytest.mark.long(all_but=["None"])
def test_masks_are_loaded_one_chunk_ahead(lengths: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses launch settings that load chunks before their use, as on a GPU. Masks are then loaded one chunk ahead."""
    plan = _buckets._INTERPRETED
    ahead = replace(plan, forward=replace(plan.forward, stages=3), backward=replace(plan.backward, stages=2))
    monkeypatch.setattr(_buckets, "_INTERPRETED", ahead)
    _buckets._choose_plan.cache_clear()
    specs: list[ForwardSpec | BackwardSpec] = []
    for name in ("forward_source", "backward_source"):
        write = getattr(_pointwise_step, name)

        def note(*a: Any, write: Any = write) -> Any:
            specs.append(a[-1])
            return write(*a)

        monkeypatch.setattr(_pointwise_step, name, note)
    options = {"resets": make_resets()} | ({} if lengths is None else {"lengths": lengths})
    x = torch.randn(T, B, FEATURES, generator=torch.Generator().manual_seed(2)) + 0.5
    try:
        results = run(LIF(backend="triton", tau=1.25), [x], **options)  # No other test compiles kernels of this tau.
    finally:
        _buckets._choose_plan.cache_clear()
    expected = run(LIF(backend="torch", tau=1.25), [x], **options)
    assert [any(layout.early for layout in spec.inputs) for spec in specs] == [True, True]
    assert torch.equal(results[0], expected[0])
    torch.testing.assert_close(results[1], expected[1])
    assert torch.equal(results[2][0], expected[2][0])


@pytest.mark.gpu
@pytest.mark.parametrize("features", [35, 128])
def test_resets_on_a_gpu_equal_the_loop(features: int) -> None:
    x = torch.randn(T, B, features, generator=torch.Generator().manual_seed(2)).cuda() + 0.5
    results = []
    for backend in ("triton", "torch"):
        neuron = LIF(backend=backend)
        leaf = x.clone().requires_grad_()
        output = neuron(leaf, resets=make_resets().cuda())
        results.append((output.detach(), neuron.states[0].detach(), *torch.autograd.grad(output.sum(), leaf)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][2], results[1][2])


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_gradients_do_not_cross_a_reset(backend: str) -> None:
    neuron = LIF(v_reset=None, backend=backend)
    x = torch.rand(9, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    resets = torch.zeros(9, 2, dtype=torch.bool)
    resets[5, 1] = True
    for _ in range(3):
        neuron.reset()
        output = neuron(x, resets=resets)
        (gradient,) = torch.autograd.grad(output[5:].sum(), x)
        assert gradient[:5, 0].any()
        assert not gradient[:5, 1].any()
        assert gradient[5:, 1].any()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_single_steps_with_resets_equal_a_sequence(backend: str) -> None:
    """Runs a stream of episodes, one step at a time."""
    neuron, resets = LIF(v_reset=-0.3, backend=backend), make_resets()
    x = 2 * torch.rand(T, B, FEATURES, generator=torch.Generator().manual_seed(0))
    expected = neuron(x, resets=resets)
    states = neuron.states
    neuron.reset()
    neuron.step_mode = "s"
    with torch.no_grad():
        steps = [neuron(step, resets=resets_of_step) for step, resets_of_step in zip(x, resets, strict=True)]
    assert torch.equal(torch.stack(steps), expected)
    assert torch.equal(neuron.states[0], states[0])


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_networks_accept_lengths_and_resets_together(backend: str) -> None:
    net = nn.Sequential(OverTime(nn.Linear(4, 5)), LIF(), nn.Linear(5, 3), LIF(v_reset=0.1))
    functional.set_backend(net, backend)
    x, lengths = 3 * torch.rand(9, 2, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([6, 9])
    resets = torch.zeros(9, 2, dtype=torch.bool)
    resets[4] = True
    resets[7] = True
    output = functional.run(net, x, lengths=lengths, resets=resets)
    last = functional.get_states(net)["3"][0]
    functional.reset_net(net)
    pieces = [x[:4], x[4:7], x[7:]]
    outputs_of_parts = []
    for piece in pieces:
        functional.reset_net(net)
        outputs_of_parts.append(net(piece))
    expected = torch.cat(outputs_of_parts)
    assert torch.equal(output[:, 1], expected[:, 1])
    assert torch.equal(output[:6, 0], expected[:6, 0])
    assert not output[6:, 0].any()
    functional.reset_net(net)
    net(x[4:6])
    assert torch.equal(last[0], functional.get_states(net)["3"][0][0])


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_learned_initial_state_has_gradients_from_resets(backend: str) -> None:
    class Begins(LIF):
        def __init__(self) -> None:
            super().__init__(v_reset=None, backend=backend)
            self.start = nn.Parameter(torch.tensor([0.5]))

        def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
            return [self.start.expand(inputs[0].shape[1:] if step_mode == "m" else inputs[0].shape).clone()]

    neuron = Begins()
    x = torch.rand(9, 2, 4, generator=torch.Generator().manual_seed(0))
    resets = torch.zeros(9, 2, dtype=torch.bool)
    resets[5] = True
    (gradient,) = torch.autograd.grad(neuron(x, resets=resets).sum(), neuron.start)
    expected = torch.zeros(1)
    for piece in (x[:5], x[5:]):
        neuron.reset()
        expected += torch.autograd.grad(neuron(piece).sum(), neuron.start)[0]
    torch.testing.assert_close(gradient, expected)
    assert expected.abs() > 0


def test_wrong_resets_are_refused() -> None:
    neuron, x = LIF(), torch.ones(3, 2, 4)
    with pytest.raises(TypeError, match="resets is a list"):
        neuron(x, resets=[True])
    with pytest.raises(ParameterError, match=r"resets are torch.int64; give booleans"):
        neuron(x, resets=torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(ParameterError, match=r"shape \[2\]; expected \[3, 2\] for this input"):
        neuron(x, resets=torch.ones(2, dtype=torch.bool))
    neuron.step_mode = "s"
    with pytest.raises(ParameterError, match=r"shape \[3, 2\]; expected \[2\] for this input: one boolean"):
        neuron(x[0], resets=torch.ones(3, 2, dtype=torch.bool))
