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


def make_neuron(backend: str = "auto", **options: object) -> FlexSN:
    return FlexSN(Step(6), 1, 2, 1, backend=backend, **options).to(DEVICE)  # type: ignore[arg-type]


def get_weight(module: FlexSN) -> nn.Parameter:
    assert isinstance(module.core, Step)
    return module.core.weight


def draw_current(num_steps: int = 5, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(num_steps, batch, 6, generator=generator) * 32).round() / 8
    return values.to(DEVICE).requires_grad_()


def test_results_equal_the_loop_and_explain_reports_the_product() -> None:
    x = draw_current()
    results = []
    for backend in ("auto", "torch"):
        module = make_neuron(backend, store_state_seqs=True)
        assert "nothing has run yet" in module.explain()
        spikes = module(x)
        spikes = spikes + 2 * module(x)  # This call continues from the current state.
        (spikes.sum() + module.states[1].sum()).backward()
        assert x.grad is not None
        results.append((spikes, module.states[1], module.state_seqs[1], x.grad, get_weight(module).grad))
        if backend == "auto":
            account = module.explain(x)
            assert account.startswith(f"{COMPILED}: ")
            assert "launches step by step" in account
            assert "aten.mm.default [3, 6] x [6, 6]: at every step" in account
            assert "test_nn_products.py" in account
            assert "training keeps for the backward, over all steps: product 0 (360 B), state 0 (360 B)" in account
        x.grad = None
    *values, input_grads, weight_grads = zip(*results, strict=True)
    for compiled, looped in values:
        assert torch.equal(compiled, looped)
    torch.testing.assert_close(*input_grads)
    torch.testing.assert_close(*weight_grads)


def test_single_steps_copies_and_converted_modules_have_equal_results() -> None:
    x = draw_current().detach()
    sequence_neuron, step_neuron = (
        make_neuron(),
        make_neuron("torch" if DEVICE.type == "cuda" else "auto", step_mode="s"),
    )
    spikes = sequence_neuron(x)
    assert torch.equal(spikes, torch.stack([step_neuron(step) for step in x]))
    twin = copy.deepcopy(sequence_neuron)
    with torch.no_grad():
        get_weight(twin).zero_()
    assert not torch.equal(sequence_neuron(x), twin(x))
    assert torch.equal(sequence_neuron(x), run_single_steps(step_neuron, x, 2)[-1])
    sequence_neuron.reset()
    double_spikes = sequence_neuron.double()(x.double())
    assert double_spikes.dtype == torch.float64
    assert torch.equal(double_spikes, spikes.double())


def run_single_steps(module: FlexSN, x: Tensor, times: int) -> list[Tensor]:
    return [torch.stack([module(step) for step in x]) for _ in range(times)]


def test_no_steps_return_empty_results() -> None:
    module = make_neuron(COMPILED)
    assert module(draw_current(0)).shape == (0, 3, 6)
    assert [state.shape for state in module.states] == [(3, 6), (3, 6)]


def test_a_kernel_equals_the_loop() -> None:
    core, x = Step(6).to(DEVICE), draw_current()
    zero = torch.zeros(3, 6, device=DEVICE)
    spikes, *sequences = FlexSNKernel(core, 1, 2, 1)(x, zero, zero)
    assert torch.equal(spikes, FlexSN(core, 1, 2, 1, backend="torch")(x))
    assert [sequence.shape for sequence in sequences] == [(5, 3, 6), (5, 3, 6)]


def test_a_compiled_network_runs_the_kernels() -> None:
    x = draw_current().detach()
    eager, module = make_neuron(), make_neuron()
    expected = eager(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a compiled scan runs as a loop")
        output = torch.compile(module)(x)
    assert torch.equal(output, expected)
