"""Modules whose step multiplies spikes by a matrix."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsn_nn import FlexSN, FlexSNKernel
from flexsn_nn.surrogate import ATan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = "triton" if DEVICE.type == "cuda" else "cpp"


class Step(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.spike = ATan()
        self.weight = nn.Parameter(torch.eye(features).flip(0) * 0.5)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + (x + F.linear(s, self.weight) - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


def neuron(backend: str = "auto", **options: object) -> FlexSN:
    return FlexSN(Step(6), 1, 2, 1, backend=backend, **options).to(DEVICE)  # type: ignore[arg-type]


def weight(module: FlexSN) -> nn.Parameter:
    assert isinstance(module.core, Step)
    return module.core.weight


def current(num_steps: int = 5, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(num_steps, batch, 6, generator=generator) * 32).round() / 8
    return values.to(DEVICE).requires_grad_()


def test_results_equal_the_loop_and_explain_reports_the_product() -> None:
    x = current()
    found = []
    for backend in ("auto", "torch"):
        module = neuron(backend, store_state_seqs=True)
        assert "nothing has run yet" in module.explain()
        spikes = module(x)
        spikes = spikes + 2 * module(x)  # This call continues from the current state.
        (spikes.sum() + module.states[1].sum()).backward()
        assert x.grad is not None
        found.append((spikes, module.states[1], module.state_seqs[1], x.grad, weight(module).grad))
        if backend == "auto":
            said = module.explain(x)
            assert said.startswith(f"{COMPILED}: ")
            assert "launches step by step" in said
            assert "aten.mm.default [3, 6] x [6, 6]: at every step" in said
            assert "test_nn_products.py" in said
            assert "training keeps at every step, for the backward: product 0 (360 B), state 0 (360 B)" in said
        x.grad = None
    *values, grad, of_weight = zip(*found, strict=True)
    for compiled, looped in values:
        assert torch.equal(compiled, looped)
    torch.testing.assert_close(*grad)
    torch.testing.assert_close(*of_weight)


def test_single_steps_copies_and_moves() -> None:
    x = current().detach()
    whole, single = neuron(), neuron("torch" if DEVICE.type == "cuda" else "auto", step_mode="s")
    spikes = whole(x)
    assert torch.equal(spikes, torch.stack([single(one) for one in x]))
    twin = copy.deepcopy(whole)
    with torch.no_grad():
        weight(twin).zero_()
    assert not torch.equal(whole(x), twin(x))
    assert torch.equal(whole(x), single_steps(single, x, 2)[-1])
    whole.reset()
    wide = whole.double()(x.double())
    assert wide.dtype == torch.float64
    assert torch.equal(wide, spikes.double())


def single_steps(module: FlexSN, x: Tensor, times: int) -> list[Tensor]:
    return [torch.stack([module(one) for one in x]) for _ in range(times)]


def test_no_steps() -> None:
    module = neuron(COMPILED)
    assert module(current(0)).shape == (0, 3, 6)
    assert [state.shape for state in module.states] == [(3, 6), (3, 6)]


def test_kernel() -> None:
    core, x = Step(6).to(DEVICE), current()
    zero = torch.zeros(3, 6, device=DEVICE)
    spikes, *sequences = FlexSNKernel(core, 1, 2, 1)(x, zero, zero)
    assert torch.equal(spikes, FlexSN(core, 1, 2, 1, backend="torch")(x))
    assert [sequence.shape for sequence in sequences] == [(5, 3, 6), (5, 3, 6)]


def test_a_compiled_network_runs_the_kernels() -> None:
    x = current().detach()
    eager, module = neuron(), neuron()
    expected = eager(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a compiled scan runs as a loop")
        got = torch.compile(module)(x)
    assert torch.equal(got, expected)
