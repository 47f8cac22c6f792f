"""Calls that repeat an earlier call: changes between the calls are detected, and results equal the loop."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, FlexSN
from flexsn_nn.functional import reset_net
from flexsn_nn.layer import NormNeuron
from flexsn_nn.neuron import ParametricLIF
from flexsn_nn.surrogate import ATan, Sigmoid
from flexsn_runtime import TransformError, repeated_scan
from flexsn_runtime.program import _repeated

T, STEP = 3, (2, 5)


@pytest.fixture(params=["triton", pytest.param("cpp", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param


class Decay(nn.Module):
    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.full((5,), decay))
        self.spike = Sigmoid()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = self.decay * v + x
        s = self.spike(h - 1.0)
        return s, h * (1 - s)


def draw_input(seed: int = 0) -> Tensor:
    return 2 * torch.rand(T, *STEP, generator=torch.Generator().manual_seed(seed))


def train_once(neuron: FlexSN, x: Tensor) -> list[Tensor]:
    """Returns the outputs of two calls, of which the first begins with the initial state, and the gradients."""
    neuron.reset()
    leaf = x.clone().requires_grad_()
    first, second = neuron(leaf), neuron(leaf)
    weights = torch.linspace(-1, 1, first.numel()).view_as(first)
    loss = (first * weights).sum() + (second * weights).sum() + neuron.states[0].sum()
    leaves = [leaf, *neuron.parameters()]
    gradients = torch.autograd.grad(loss, leaves)
    neuron.reset()
    return [first.detach(), second.detach(), *gradients]


def assert_equal_to_the_loop(neuron: FlexSN, x: Tensor) -> None:
    loop = deepcopy(neuron)
    loop.backend = "torch"
    for result, expected in zip(train_once(neuron, x), train_once(loop, x), strict=True):
        torch.testing.assert_close(result, expected)
    with torch.no_grad():
        reset_net(nn.ModuleList([neuron, loop]))
        assert torch.equal(neuron(x), loop(x))
        assert torch.equal(neuron(x), loop(x))
        reset_net(nn.ModuleList([neuron, loop]))


CHANGES: dict[str, Callable[[FlexSN], object]] = {
    "a number": lambda n: setattr(n, "tau", 3.0),
    "its reset": lambda n: setattr(n, "detach_reset", True),
    "its surrogate": lambda n: setattr(n, "surrogate_function", ATan()),
    "a tensor": lambda n: n.hold("v_threshold", torch.rand(5) + 0.5),  # type: ignore[operator]
    "a learned one": lambda n: n.hold("v_threshold", 0.7, learn=True),  # type: ignore[operator]
}


@pytest.mark.long(all_but=["triton-a number"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_neuron_is_detected(change: str, backend: str) -> None:
    neuron = LIF(backend=backend)
    for seed in range(2):
        assert_equal_to_the_loop(neuron, draw_input(seed))
    CHANGES[change](neuron)
    for seed in range(2):
        assert_equal_to_the_loop(neuron, draw_input(seed))


def test_a_change_of_a_core_is_detected(backend: str) -> None:
    core = Decay(0.5)
    neuron = FlexSN(core, 1, 1, 1, backend=backend)
    assert_equal_to_the_loop(neuron, draw_input())
    with torch.no_grad():
        core.decay.fill_(0.9)
    assert_equal_to_the_loop(neuron, draw_input())
    core.decay = nn.Parameter(torch.full((1,), 0.8))
    assert_equal_to_the_loop(neuron, draw_input())
    core = Decay(0.2)
    neuron.add_module("core", core)  # This replaces the core without an assignment.
    assert_equal_to_the_loop(neuron, draw_input())
    core.decay.requires_grad_(False)
    leaf = draw_input().requires_grad_()
    neuron(leaf).sum().backward()
    assert core.decay.grad is None


def test_repeated_calls_skip_the_path_of_first_calls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that repeated calls do not enter `_run`, the path of first calls."""
    neuron = ParametricLIF(backend=backend)
    assert_equal_to_the_loop(neuron, draw_input())
    monkeypatch.setattr(FlexSN, "_run", None)
    x = draw_input().requires_grad_()
    neuron(x)
    (gradient,) = torch.autograd.grad(neuron(x).sum(), neuron.w)
    assert gradient.abs() > 0
    with torch.no_grad():
        neuron(x)
    assert repeated_scan(neuron._get_program(), (x.double(),), []) is None


@pytest.mark.parametrize("keep", [False, True])
def test_calls_that_count_spikes_are_repeated(keep: bool, monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    neurons = [LIF(backend=backend, store_state_seqs=keep) for backend in ("cpp", "torch")]
    run = FlexSN._run
    runs: list[str] = []

    def note(neuron: FlexSN, *arguments: Any, **options: Any) -> Any:
        runs.append(neuron.backend)
        return run(neuron, *arguments, **options)

    monkeypatch.setattr(FlexSN, "_run", note)
    for neuron in neurons:
        neuron.count_spikes = True
    for seed in range(5):
        results = []
        for neuron in neurons:
            neuron.reset()
            leaf = (draw_input(seed) * 2).requires_grad_()
            y = neuron(leaf)
            counts = neuron.spike_counts
            assert counts is not None
            with torch.no_grad():
                later = [neuron(draw_input(seed)), neuron.spike_counts]
            values = [y, counts, *later, *neuron.states, *neuron.state_seqs]
            gradients = torch.autograd.grad(y.sum() + counts.square().sum(), leaf)
            results.append([*(t.detach() for t in values if t is not None), *gradients])
        assert len(results[0]) == len(results[1]) == 6 + keep
        for result, expected in zip(*results, strict=True):
            torch.testing.assert_close(result, expected)
    assert runs.count("torch") == 10
    # One run is with gradients, without a state. The other run is without gradients, from a state.
    assert runs.count("cpp") == 2


@pytest.mark.long(all_but=["s"])
@pytest.mark.parametrize("step_mode", ["s", "m"])
def test_a_call_like_the_previous_one_needs_no_key(
    step_mode: str, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    """Checks that no key is computed, and that changes between the calls take effect."""
    core = Decay(0.5)
    neuron = FlexSN(core, 1, 1, 1, backend="cpp", step_mode=step_mode)
    loop = FlexSN(core, 1, 1, 1, backend="torch", step_mode=step_mode)

    def assert_equal(x: Tensor) -> None:
        assert torch.equal(neuron(x), loop(x))
        assert torch.equal(neuron.states[0], loop.states[0])

    def draw(seed: int) -> Tensor:
        return draw_input(seed)[0] if step_mode == "s" else draw_input(seed)

    with torch.no_grad():
        for seed in range(4):
            assert_equal(draw(seed))
        with monkeypatch.context() as patch:
            patch.setattr(_repeated, "layout_key", None)
            assert_equal(draw(4))
            core.decay.fill_(0.9)
            assert_equal(draw(5))
            core.decay = nn.Parameter(torch.full((5,), 0.3))
            assert_equal(draw(6))
        core.decay = nn.Parameter(torch.full((1,), 0.8))
        assert_equal(draw(7))
        core.decay.data = torch.full((5,), 0.1)
        assert_equal(draw(9))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_equal(draw(10))


def test_other_layouts_and_dtypes_equal_the_loop(backend: str) -> None:
    neuron, x = LIF(backend=backend), draw_input()
    assert_equal_to_the_loop(neuron, x)
    for variant in (x.double(), x[:2], x[..., :3], x.transpose(1, 2), x.bfloat16(), x.new_empty(0, *STEP)):
        neuron.reset()
        loop = LIF(backend="torch")
        if variant.numel():
            torch.testing.assert_close(neuron(variant), loop(variant))
        else:
            assert neuron(variant).shape == variant.shape
    neuron.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(neuron(x), LIF(backend="torch")(x))
    neuron.reset()
    with pytest.raises(TypeError, match="input 0 is a list"):
        neuron([1.0])
    neuron.reset()
    with pytest.raises(TransformError):
        torch.func.grad(lambda input: neuron(input).sum())(x)


def test_states_of_another_shape_are_refused(backend: str) -> None:
    neuron, x = LIF(backend=backend), draw_input()
    neuron(x), neuron(x)
    with pytest.raises(ValueError, match="state 0 has shape"):
        neuron(draw_input()[..., :3])


def test_overridden_initial_states_are_detected(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    neuron, x = LIF(backend=backend), draw_input()
    expected = neuron(x)
    neuron.reset()

    def ones(self: FlexSN, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        return [torch.ones_like(inputs[0][0])]

    monkeypatch.setattr(LIF, "init_states", ones)
    assert not torch.equal(neuron(x), expected)


def test_replaced_memory_does_not_change_the_backward(backend: str) -> None:
    """Assigns `tensor.data`, like `module.to(...)` and sharding do. This does not change the version counter."""
    neuron, weight = LIF(backend=backend), torch.linspace(-1, 1, T * 10).view(T, *STEP)
    x = draw_input().requires_grad_()
    for _ in range(2):
        neuron.reset()
        (expected,) = torch.autograd.grad(neuron(x), x, weight)
    neuron.reset()
    output = neuron(x)
    x.data = x.data.transpose(1, 2).contiguous().transpose(1, 2)
    (gradient,) = torch.autograd.grad(output, x, weight)
    torch.testing.assert_close(gradient, expected)


def test_gradients_of_any_layout_equal_those_of_the_loop(backend: str) -> None:
    neuron, x = LIF(backend=backend), draw_input().requires_grad_()
    loop = LIF(backend="torch")
    losses: list[Callable[[FlexSN], Tensor]] = [
        lambda n: n(x).sum(),  # This loss has an expanded gradient.
        lambda n: (n(x), n.states[0].square().sum())[1],
        lambda n: (n(x) * draw_input(1)).sum() + n.states[0].sum(),
        lambda n: n(x).transpose(0, 2).contiguous().mul(draw_input(2).transpose(0, 2).contiguous()).sum(),
        lambda n: torch.imag(torch.complex(n(x), n(x)).conj()).sum(),  # This loss has a lazily negated gradient.
    ]
    for compute_loss in losses:
        for _ in range(2):
            reset_net(nn.ModuleList([neuron, loop]))
            (gradient,), (expected,) = (torch.autograd.grad(compute_loss(n), x) for n in (neuron, loop))
            torch.testing.assert_close(gradient, expected)


def test_a_norm_in_the_step_is_computed_in_repeated_calls(backend: str) -> None:
    fused, x = NormNeuron(nn.BatchNorm1d(5), LIF(backend=backend)), draw_input()
    loop = deepcopy(fused)
    loop.neuron.backend = "torch"
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    for frozen in (False, False, True, True, False):
        gradients = []
        for net in (fused, loop):
            net.neuron.reset()
            net.norm.requires_grad_(not frozen)
            leaf = x.clone().requires_grad_()
            leaves = [leaf, *(() if frozen else net.norm.parameters())]
            gradients.append(torch.autograd.grad((net(leaf) * weights).sum(), leaves))
            with torch.no_grad():
                for parameter in net.norm.parameters():
                    parameter.add_(0.1)
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)
