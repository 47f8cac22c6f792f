"""`fuse_delays`: neurons whose kernels load earlier steps equal a delay before the neuron."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ALIF, LIF, FlexSN, ParametricLIF, Recurrent
from flexsn_nn.fusion import fuse_delays, unfuse_norms
from flexsn_nn.layer import Delay

Net = nn.Sequential


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_learned(*shape: int, max_delay: int = 6) -> Delay:
    """Makes a layer of learned delays. Its delays include the largest one and a whole number."""
    delay = max_delay * draw(*shape, seed=1)
    flat = delay.view(-1)
    flat[0], flat[-1] = max_delay, flat[-1].round()
    return Delay(delay, max_delay=max_delay, learn=True)


# Sequences of more than several chunks, and sequences that are shorter than the delay.
CASES: dict[str, tuple[Callable[[], Delay], Callable[[], FlexSN], tuple[int, ...]]] = {
    "for each neuron": (lambda: make_learned(5), LIF, (21, 3, 5)),
    "for each channel": (lambda: make_learned(3, 1), ParametricLIF, (10, 2, 3, 4)),
    "one for all": (lambda: make_learned(1), ALIF, (13, 2, 5)),
    "for each element": (lambda: make_learned(2, 5), LIF, (9, 2, 5)),
    "of few steps": (lambda: make_learned(5), LIF, (4, 2, 5)),
    "of one step": (lambda: make_learned(5), LIF, (1, 2, 5)),
    "a number": (lambda: Delay(2.3), LIF, (11, 2, 5)),
    "a whole number": (lambda: Delay(3), LIF, (11, 2, 5)),
    "given, whole": (lambda: Delay(torch.tensor([0.0, 2, 3, 1, 0])), ALIF, (11, 2, 5)),
}


def make_pair(delay: Delay, neuron: FlexSN) -> tuple[Net, Net]:
    """Makes a network whose neuron computes the delay in its kernels, and an equal network without fusion."""
    apart = Net(delay, neuron).double()
    fused = copy.deepcopy(apart)
    assert fuse_delays(fused).fused == {"0": "1"}
    return fused, apart


def run(net: Net, x: Tensor, **options: Any) -> list[Tensor]:
    """Returns outputs, states and gradients."""
    leaf = x.clone().requires_grad_()
    output: Any = net[1](net[0](leaf), **options)
    weights = torch.arange(output.numel(), device=x.device).cos().view(output.shape).to(x.dtype)
    loss = (output * weights).sum() + sum((state * state).sum() for state in net[1].states)  # type: ignore[union-attr]
    gradients = torch.autograd.grad(loss, [leaf, *net.parameters()])
    layers: Any = net
    states = (*layers[1].states, *layers[0].states)
    return [output.detach(), *(state.detach() for state in states), *gradients]


def check_results(fused: list[Tensor], apart: list[Tensor], num_gradients: int, tolerance: float = 1e-12) -> None:
    """Checks that outputs and states are bitwise equal, and that gradients are equal up to the order of sums."""
    assert len(fused) == len(apart)
    for i, (ours, theirs) in enumerate(zip(fused, apart, strict=True)):
        if i < len(fused) - num_gradients:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def forbid_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each delay that runs before a neuron raise an error."""

    def refused(self: Delay, x: Tensor) -> Tensor:
        raise AssertionError("the delay ran before the neuron")

    monkeypatch.setattr(Delay, "of", refused)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.long(all_but=["for each neuron", "a number"])
def test_a_fused_delay_equals_a_delay_before_the_neuron(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, neuron, shape = CASES[case]
    fused, apart = make_pair(make(), neuron())
    fused[1].backend, apart[1].backend = "triton", "torch"  # type: ignore[assignment]
    x = draw(*shape) * 2
    expected = run(apart, x)
    if shape[0] > 1:
        forbid_delays(monkeypatch)
    for _ in range(2):  # The second call repeats the recorded operations of the first call.
        fused[0].reset()  # type: ignore[operator]
        fused[1].reset()  # type: ignore[operator]
        check_results(run(fused, x), expected, 1 + len(list(apart.parameters())))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("option", ["lengths", "resets", "both"])
@pytest.mark.long(all_but=["both"])
def test_delays_with_lengths_and_resets_equal_those_of_the_loop(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, apart = make_pair(make_learned(5), LIF())
    fused[1].backend, apart[1].backend = "triton", "torch"  # type: ignore[assignment]
    options: dict[str, Tensor] = {}
    if option != "resets":
        options["lengths"] = torch.tensor([17, 4, 0])
    if option != "lengths":
        options["resets"] = draw(21, 3) < 0.2
    x = draw(21, 3, 5) * 2
    expected = run(apart, x, **options)
    forbid_delays(monkeypatch)
    check_results(run(fused, x, **options), expected, 2)


@pytest.mark.usefixtures("interpreted")
def test_gradients_equal_finite_differences() -> None:
    fused, _ = make_pair(make_learned(4), LIF(backend="triton"))

    def function(x: Tensor, delay: Tensor) -> Tensor:
        for layer in fused:
            layer.reset()  # type: ignore[operator]
        torch.func.functional_call(fused, {"0.delay": delay}, (x,))
        state: Tensor = fused[1].states[0]  # type: ignore[index]  # spikes have no differences
        return state

    x = 0.2 * draw(9, 1, 4)  # With these values, no neuron fires.
    delay = 0.1 + 5 * draw(4, seed=3)
    fused[1].v_threshold = 1e6  # type: ignore[assignment]
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), delay.requires_grad_()), fast_mode=True)


def add_sum(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v / 2 + x + 0.1 * x.sum(-1, keepdim=True)
    return torch.tanh(h), h


def make_gaussian() -> Delay:
    return Delay(torch.tensor([0.4, 3.6, 2.0, 1.0, 5.9]), interpolation="gaussian", max_delay=6, learn=True)


APART: dict[str, tuple[Callable[[], Delay], Callable[[], FlexSN]]] = {
    "a step with sums over neurons": (lambda: make_learned(5), lambda: FlexSN(add_sum, 1, 1, 1)),
    "a recurrent layer": (lambda: make_learned(5), lambda: Recurrent(LIF(), 5)),
    "a delay with a width": (make_gaussian, LIF),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", APART)
@pytest.mark.long(all_but=["a step with sums over neurons"])
def test_the_delay_runs_before_neurons_that_cannot_compute_it(case: str) -> None:
    delay, neuron = APART[case]
    torch.manual_seed(0)
    fused, apart = make_pair(delay(), neuron())
    fused[1].backend, apart[1].backend = "triton", "torch"  # type: ignore[assignment]
    x = draw(7, 3, 5)
    for _ in range(2):
        for net in (fused, apart):
            for layer in net:
                layer.reset()  # type: ignore[operator]
        check_results(run(fused, x), run(apart, x), 1 + len(list(apart.parameters())), 1e-9)


@pytest.mark.usefixtures("interpreted")
def test_parts_of_a_sequence_in_evaluation_continue() -> None:
    """Runs a sequence in two parts, in evaluation. The second call continues from the states of the first call."""
    fused, apart = make_pair(make_gaussian(), LIF())
    fused[1].backend, apart[1].backend = "auto", "torch"  # type: ignore[assignment]
    x = draw(8, 3, 5)
    for backend in ("triton", "torch"):
        fused[1].backend = backend  # type: ignore[assignment]
        for net in (fused, apart):
            net.eval()
            for layer in net:
                layer.reset()  # type: ignore[operator]
        for part in (x[:3], x[3:]):
            with torch.no_grad():
                assert torch.equal(fused(part), apart(part))
        assert torch.equal(fused[0].states[0], apart[0].states[0])  # type: ignore[index]


def test_unfused_delays_have_a_reason() -> None:
    class Overriding(Delay):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.a, self.b = Delay(1), LIF(), LIF()

        def forward(self, x: Tensor) -> Tensor:
            late = self.late(x)
            return self.a(late) + self.b(late)  # type: ignore[no-any-return]

    hooked = Net(Delay(1), LIF())
    hooked[0].register_forward_hook(lambda *_: None)
    reasons = {
        "not a neuron": Net(Delay(1), nn.Linear(3, 3)),
        "2 readers": Twice(),
        "overrides forward": Net(Overriding(1), LIF()),
        "forward hook": hooked,
        "step_mode": Net(Delay(1, step_mode="s"), LIF()),
    }
    for reason, net in reasons.items():
        report = fuse_delays(net)
        assert not report.fused
        assert reason in str(report)
    net = Net(Delay(1), LIF())
    assert fuse_delays(net, skip=["1"]).left == {"0": "it is in skip"}
    assert str(fuse_delays(net)) == str(fuse_delays(net)) == "1 of 1 delays are computed by neurons\n  0 into 1"
    unfuse_norms(net)
    x = torch.rand(4, 2)
    assert torch.equal(net[0](x)[1:], x[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_fused_delays_on_a_gpu_equal_delays_before_the_neuron(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, neuron, (num_steps, *step) = CASES[case]
    fused, apart = (net.to("cuda", dtype) for net in make_pair(make(), neuron()))
    x = (2 * draw(num_steps, 2 if case == "for each element" else 37, *step[1:])).to("cuda", dtype)
    expected = run(apart, x)
    if num_steps > 1:
        forbid_delays(monkeypatch)
    for _ in range(2):
        fused[0].reset()  # type: ignore[operator]
        fused[1].reset()  # type: ignore[operator]
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]
        check_results(run(fused, x), expected, 1 + len(list(apart.parameters())), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(40, 64, 512), (100, 7, 130), (12, 16, 8, 20, 20)])
@pytest.mark.parametrize("option", ["nothing", "lengths", "channels last"])
def test_fused_delays_of_large_steps_on_a_gpu_are_equal(
    shape: tuple[int, ...], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay = make_learned(*shape[2:3], *[1] * (len(shape) - 3), max_delay=20)
    fused, apart = (net.to("cuda", torch.float32) for net in make_pair(delay, LIF()))
    x = (2 * draw(*shape)).float().cuda()
    options: dict[str, Tensor] = {}
    if option == "lengths":
        options["lengths"] = torch.randint(0, shape[0] + 1, shape[1:2])
    if option == "channels last":
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    expected = run(apart, x, **options)
    forbid_delays(monkeypatch)
    check_results(run(fused, x, **options), expected, 2, 1e-3)
