"""The compiled operator on a GPU: kernels launched from Inductor's code equal the eager scan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from scan_cores import CASES, Case, Problem, hard_spike, problem
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_hop import scan as hop_scan
from flexsn_nn import FlexSN

pytestmark = [
    pytest.mark.gpu,
    # Dynamo and Inductor cause these warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]

Run = Callable[..., tuple[Tensor, ...]]
PAIRS: dict[str, tuple[Run, Run]] = {
    "sequence": (flex_sn_scan, eager_scan),
    "final": (flex_sn_scan_final_state, eager_scan_final_state),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compute_values_and_gradients(run: Run, p: Problem) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Returns the results, and the gradients of all leaves, including parameters that the core captures."""
    results = run(*p.inputs, *p.states)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator, device="cuda", dtype=r.dtype) for r in results]
    loss = torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()
    return [r.detach() for r in results], torch.autograd.grad(loss, p.leaves, materialize_grads=True)


def assert_same(run: Run, expected: Run, p: Problem) -> None:
    values, gradients = compute_values_and_gradients(run, p)
    expected_values, expected_gradients = compute_values_and_gradients(expected, p)
    for value, other in zip(values, expected_values, strict=True):
        assert torch.equal(value, other)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_core_equals_the_eager_scan(case: Case, kind: str) -> None:
    scan, reference = PAIRS[kind]
    p = problem(case, 11, (6, 40), device="cuda")
    run = torch.compile(partial(scan, p.core, *p.counts, lowering="kernel"), fullgraph=True, dynamic=False)
    assert_same(run, partial(reference, p.core, *p.counts), p)


@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[8], CASES[10]], ids=lambda case: case.name)
def test_new_lengths_and_batches_are_not_compiled_again(case: Case) -> None:
    counter = CompileCounterWithBackend("inductor")
    first = problem(case, 9, (5, 40), device="cuda")
    compiled = torch.compile(
        lambda *flat: flex_sn_scan_final_state(first.core, *first.counts, *flat, lowering="kernel"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for steps, batch in ((9, 5), (4, 7), (64, 2), (17, 300)):
        p = problem(case, steps, (batch, 40), device="cuda", seed=steps)
        if any(parameter.shape[:1] == (5,) for parameter in first.parameters):
            batch = 5  # the captured parameter has this batch size
            p = problem(case, steps, (batch, 40), device="cuda", seed=steps)
        p = Problem(first.core, p.counts, p.inputs, p.states, first.parameters)
        assert_same(compiled, partial(eager_scan_final_state, p.core, *p.counts), p)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[8]], ids=lambda case: case.name)
def test_kernels_run_with_inductors_static_launcher(case: Case, dynamic: bool) -> None:
    """Checks that results are equal with an option of Inductor that launches kernels without Triton's launcher."""
    scan, reference = PAIRS["final"]
    p = problem(case, 11, (6, 40), device="cuda")
    run = torch.compile(
        partial(scan, p.core, *p.counts, lowering="kernel"),
        fullgraph=True,
        dynamic=dynamic,
        options={"static_launch_user_defined_triton_kernels": True},
    )
    assert_same(run, partial(reference, p.core, *p.counts), p)


def test_generated_code_launches_kernels_directly() -> None:
    p = problem(CASES[1], 8, (16, 128), device="cuda")

    def network(scan: Run, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        spikes, last = scan(p.core, *p.counts, torch.relu(x) * 2.0, v)
        return spikes * 0.5, last * 2.0

    run = torch.compile(partial(network, flex_sn_scan_final_state), fullgraph=True, dynamic=False)
    _, codes = run_and_get_code(lambda: compute_values_and_gradients(run, p))
    assert len(codes) == 2
    for code, kernel in zip(codes, ("scan_forward", "scan_backward"), strict=True):
        assert len(re.findall(rf"{kernel}_\w+\.run\(", code)) == 1
        assert "run_scan" not in code
        assert (
            "reinterpret_tensor(" not in code
        )  # without the parenthesis, the header of each module contains this name
    assert_same(run, partial(network, eager_scan_final_state), p)


def test_spikes_equal_the_eager_scan() -> None:
    p = problem(CASES[9], 32, (64, 4096), device="cuda")
    run = torch.compile(partial(flex_sn_scan_final_state, p.core, *p.counts, lowering="kernel"), fullgraph=True)
    with torch.no_grad():
        values = run(*p.inputs, *p.states)
        expected = eager_scan_final_state(p.core, *p.counts, *p.inputs, *p.states)
    for value, other in zip(values, expected, strict=True):
        assert torch.equal(value, other)


class ConvBlock(nn.Module):
    """Convolution, batch norm and LIF on `[T, B, C, H, W]`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.neuron = FlexSN(CASES[1].make(hard_spike, []), 1, 1, 1, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset()
        h = self.bn(self.conv(x.flatten(0, 1)))
        spikes: Tensor = self.neuron(2.0 * h.unflatten(0, x.shape[:2]))
        return spikes


def compute_gradients(module: Any, x: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    result = module(x)
    weight = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape)
    return result, torch.autograd.grad((result * weight).sum(), parameters)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("backend", ["hop", "triton", "auto"])
def test_module_compiles_to_one_graph(backend: str, layout: torch.memory_format) -> None:
    module, eager = (ConvBlock(name).cuda() for name in (backend, "triton"))
    for block in (module, eager):
        block.conv.weight.data = block.conv.weight.data.to(memory_format=layout)
    x = torch.randn(4, 2, 3, 12, 12, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        result, actual_gradients = compute_gradients(
            torch.compile(module, fullgraph=True), x, list(module.parameters())
        )
        expected, expected_gradients = compute_gradients(eager, x, list(eager.parameters()))
    # The last bits of the convolutions' results differ, so a few spikes differ.
    assert (result != expected).float().mean() < 1e-3
    for gradient, other in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    assert "hop inside torch.compile" in module.neuron.explain()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty graph as a warm-up
def test_cuda_graphs_replay_kernels() -> None:
    p = problem(CASES[1], 8, (16, 128), device="cuda")
    run = torch.compile(
        partial(flex_sn_scan_final_state, p.core, *p.counts, lowering="kernel"),
        fullgraph=True,
        dynamic=False,
        mode="reduce-overhead",
    )
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        values, actual_gradients = compute_values_and_gradients(run, p)
        values, actual_gradients = [v.clone() for v in values], tuple(g.clone() for g in actual_gradients)
    expected_values, expected_gradients = compute_values_and_gradients(
        partial(eager_scan_final_state, p.core, *p.counts), p
    )
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    torch.testing.assert_close(actual_gradients, expected_gradients)


def test_core_without_kernels_runs_as_a_loop() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x.cumsum(-1)
        return torch.relu(h), h

    x, v = torch.randn(3, 4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    with pytest.warns(UserWarning, match="runs as a loop, without kernels: .*cumsum"):
        results = torch.compile(partial(flex_sn_scan, core, 1, 1, 1), fullgraph=True)(x, v)
    torch.testing.assert_close(results, eager_scan(core, 1, 1, 1, x, v))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="the lowering 'kernel' cannot compile this core"):
        torch.compile(partial(flex_sn_scan, core, 1, 1, 1, lowering="kernel"), fullgraph=True)(x, v)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [5, 64])
def test_compiled_loop_equals_the_eager_loop(size: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks Inductor's code for a step with aligned and unaligned rows, and with several blocks per step."""
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "compiled_loop")
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float64}
    weight = torch.randn(size, size, **options).div_(2 * size**0.5).requires_grad_()

    def step(carry: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(carry @ weight + x[0] * x[1])
        return carry, carry.sum(-1) + x[1].sum()

    network = torch.compile(lambda *args: hop_scan(step, *args), fullgraph=True, dynamic=True)
    for steps in (2, 7, 1030):
        memory = torch.randn(offset + steps * 3 * size, **options)
        xs = [memory[offset:].view(steps, 3, size), torch.randn(steps, size, **options)]
        leaves = [leaf.detach().requires_grad_() for leaf in (torch.randn(3, size, **options), *xs)]
        results = network(leaves[0], leaves[1:])
        expected = hop_scan(step, leaves[0], leaves[1:])
        torch.testing.assert_close(results, expected)
        grads = [
            torch.autograd.grad(carry.square().sum() + ys.square().sum(), [weight, *leaves])
            for carry, ys in (results, expected)
        ]
        torch.testing.assert_close(*grads)
