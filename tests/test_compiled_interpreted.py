"""Compiled scans in Triton's interpreter: kernels from the graph of a step have the results of the operator's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from scan_cores import CASES, Case, hard_spike, problem
from torch import Tensor

import flexsn_hop.operator._operator as operator
from flexsn_hop import (
    BackwardLayout,
    ScanLayout,
    ScanLowering,
    eager_scan,
    eager_scan_final_state,
    flex_sn_scan,
    flex_sn_scan_final_state,
    register_scan_lowering,
)
from flexsn_runtime import KernelLowering, UnsupportedScanError
from flexsn_runtime._recent import Recent
from flexsn_runtime.graphs._graph_step import GraphSpecialization

pytestmark = pytest.mark.usefixtures("interpreted")

Run = Callable[..., tuple[Tensor, ...]]
PAIRS: dict[str, tuple[Run, Run]] = {
    "sequence": (flex_sn_scan, eager_scan),
    "final": (flex_sn_scan_final_state, eager_scan_final_state),
}
INTERVAL = 4


class InterpreterLowering(KernelLowering):
    """A lowering to Triton's interpreter, which Inductor does not support. It has checkpoints, as on a GPU."""

    def __init__(self) -> None:
        super().__init__(on_cpu="triton")

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        return None

    def checkpoint_interval(self, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
        return INTERVAL


def replace_zero_states(args: Sequence[Any], layout: ScanLayout) -> list[Any]:
    """Replaces initial states of zeros by NaN, because kernels must not read them."""
    values = list(args)
    for position in layout.zero_positions:
        values[position] = torch.full_like(values[position], torch.nan)
    return values


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ScanLayout | BackwardLayout]]:
    """Runs kernels instead of the operator's loops, and records the layouts of the kernels."""
    lowering: ScanLowering = InterpreterLowering()
    layouts: list[ScanLayout | BackwardLayout] = []

    def forward(core: Any, layout: ScanLayout, args: Sequence[Any]) -> tuple[Tensor, ...]:
        layouts.append(layout)
        return tuple(lowering.forward(core, layout, replace_zero_states(args, layout)))

    def backward(core: Any, vjp: Any, layout: BackwardLayout, args: Sequence[Any]) -> tuple[Tensor, ...]:
        layouts.append(layout)
        return tuple(lowering.backward(core, vjp, layout, args))

    monkeypatch.setattr(operator, "forward_loop", forward)
    monkeypatch.setattr(operator, "backward_loop", backward)
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
    register_scan_lowering(lowering)
    torch._dynamo.reset()
    yield layouts
    torch._dynamo.reset()


def compute_values_and_gradients(run: Run, arguments: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Any, Any]:
    results = run(*arguments)
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(r * torch.randn(r.shape, generator=generator)).sum() for r in results]).sum()
    return [r.detach() for r in results], torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.long(all_but=["two_in_two_out-sequence", "alif-final"])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_core_equals_the_operator(case: Case, kind: str, kernels: list[ScanLayout | BackwardLayout]) -> None:
    scan, reference = PAIRS[kind]
    p = problem(case, 10, (3, 5))
    run = torch.compile(partial(scan, p.core, *p.counts), fullgraph=True, backend="aot_eager", dynamic=False)
    arguments = (*p.inputs, *p.states)
    actual = compute_values_and_gradients(run, arguments, p.leaves)
    assert [type(layout) for layout in kernels] == [ScanLayout, BackwardLayout]
    expected = compute_values_and_gradients(partial(reference, p.core, *p.counts), arguments, p.leaves)
    torch.testing.assert_close(actual, expected)


@pytest.mark.long(all_but=["alif-final"])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_zero_states_are_not_read(case: Case, kind: str, kernels: list[ScanLayout | BackwardLayout]) -> None:
    scan, reference = PAIRS[kind]
    p = problem(case, 10, (3, 5))
    arguments = (*p.inputs, *(torch.zeros(()).expand(3, 5) for _ in p.states))
    leaves = [leaf for leaf in p.leaves if not any(leaf is state for state in p.states)]
    zeros = (True,) * len(p.states)
    run = torch.compile(
        partial(scan, p.core, *p.counts, zero_states=zeros), fullgraph=True, backend="aot_eager", dynamic=False
    )
    actual = compute_values_and_gradients(run, arguments, leaves)
    forward, backward = kernels
    assert isinstance(forward, ScanLayout)
    assert isinstance(backward, BackwardLayout)
    assert forward.zero_states == backward.scan.zero_states == zeros
    expected = compute_values_and_gradients(partial(reference, p.core, *p.counts), arguments, leaves)
    torch.testing.assert_close(actual, expected)


def test_equal_layers_are_traced_once(
    kernels: list[ScanLayout | BackwardLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    specializations: Recent[GraphSpecialization] = Recent()
    monkeypatch.setattr("flexsn_runtime.graphs._graph_step._specializations", specializations)
    (plif,) = [case for case in CASES if case.name == "plif_channel"]
    first, second = (problem(plif, 6, (5, 3), seed=seed) for seed in (0, 1))

    def network(scan: Run, first_core: Any, second_core: Any, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        spikes, _ = scan(first_core, 1, 1, 1, x, states[0])
        return scan(second_core, 1, 1, 1, 1.5 * spikes, states[1])

    def check(layers: list[Any], required: list[Tensor], num_traces: int) -> None:
        torch._dynamo.reset()
        arguments = (first.inputs[0], first.states[0], second.states[0])
        run = torch.compile(partial(network, flex_sn_scan, *layers), fullgraph=True, backend="aot_eager")
        actual = compute_values_and_gradients(run, arguments, required)
        expected = compute_values_and_gradients(partial(network, eager_scan, *layers), arguments, required)
        torch.testing.assert_close(actual, expected)
        assert len(specializations) == num_traces

    leaves = [*first.leaves, *second.states, *second.parameters]
    check([first.core, second.core], leaves, num_traces=2)  # one forward and one backward, which both weights share

    def slower(x: Tensor, v: Tensor) -> Any:
        return first.core(0.5 * x, v)

    check([first.core, slower], [*first.leaves, *second.states], num_traces=4)


def test_only_required_gradients_are_computed(kernels: list[ScanLayout | BackwardLayout]) -> None:
    p = problem(CASES[10], 6, (3, 5))
    run = torch.compile(lambda *flat: flex_sn_scan(p.core, *p.counts, *flat)[1:2], fullgraph=True, backend="aot_eager")
    arguments = (*p.inputs, *(state.detach() for state in p.states))
    actual = compute_values_and_gradients(run, arguments, p.inputs[1:])
    layout = kernels[-1]
    assert isinstance(layout, BackwardLayout)
    assert layout.output_grads == (False, True)
    assert not any(layout.state_grads)
    expected = compute_values_and_gradients(
        lambda *flat: eager_scan(p.core, *p.counts, *flat)[1:2], arguments, p.inputs[1:]
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.long(all_but=["nhwc"])
@pytest.mark.parametrize("order", [(0, 1, 3, 4, 2), (0, 4, 2, 1, 3), (1, 0, 2, 3, 4)], ids=["nhwc", "mixed", "time"])
def test_inputs_in_another_memory_order_equal_the_operator(
    order: tuple[int, ...], kernels: list[ScanLayout | BackwardLayout]
) -> None:
    weight = torch.linspace(0.5, 1.5, 3).view(3, 1, 1).requires_grad_()

    def core(x: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x + bias - v) * torch.sigmoid(weight)
        spike = hard_spike(h - 0.5)
        return spike, h * (1.0 - spike)

    shape = (6, 2, 3, 4, 5)
    memory = torch.randn([shape[d] for d in order])
    x = memory.permute([order.index(d) for d in range(5)]).requires_grad_()
    bias, v = torch.randn(6, 3, 1, 1, requires_grad=True), torch.randn(shape[1:], requires_grad=True)
    assert x.shape == shape
    assert not x.is_contiguous()
    run = torch.compile(partial(flex_sn_scan_final_state, core, 2, 1, 1), fullgraph=True, backend="aot_eager")
    leaves = (x, bias, v, weight)
    actual = compute_values_and_gradients(run, (x, bias, v), leaves)
    assert len(kernels) == 2
    expected = compute_values_and_gradients(partial(eager_scan_final_state, core, 2, 1, 1), (x, bias, v), leaves)
    torch.testing.assert_close(actual, expected)


def test_core_without_kernels_is_refused(kernels: list[ScanLayout | BackwardLayout]) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x.cumsum(-1)
        return h, h

    run = torch.compile(partial(flex_sn_scan, core, 1, 1, 1), fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedScanError, match="cumsum"):
        run(torch.zeros(3, 4), torch.zeros(4))


def test_reason_names_the_unavailable_compiler_or_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = KernelLowering()
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = lowering.why_unavailable([torch.zeros(3, 4), torch.zeros(4)])
    assert reason is not None
    assert "no-such-compiler" in reason
    reason = lowering.why_unavailable([torch.zeros(3, 4), torch.zeros(4, device="meta")])
    assert reason is not None
    assert "cpu and meta" in reason
