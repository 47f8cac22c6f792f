"""Steps with matrix products in compiled graphs. A graph contains one node for the forward and one for the backward,
and these nodes make the same launches as eager mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from recurrent_cores import CELLS, RLIF, Cell
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import flexsn_hop.operator._operator as operator
from flexsn_hop import flex_sn_scan, flex_sn_scan_final_state, register_scan_lowering
from flexsn_hop.loop._loop import backward_loop
from flexsn_nn import LIF, Recurrent
from flexsn_runtime import KernelLowering, ScanProgram, TargetName, prepare, scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, SIZE = 3, 9
Run = Callable[..., tuple[Tensor, ...]]
RUNS: dict[bool, Run] = {True: flex_sn_scan, False: flex_sn_scan_final_state}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), warnings.catch_warnings():
        warnings.filterwarnings("error", message="a compiled scan runs as a loop")
        yield
    torch._dynamo.reset()


def replace_loops_by_kernels(monkeypatch: pytest.MonkeyPatch, target: TargetName) -> None:
    """Replaces the operators' loops by kernels. Inductor would do this, too, but these tests run without Inductor."""
    lowering = KernelLowering(on_cpu=target)
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
    register_scan_lowering(lowering)
    monkeypatch.setattr(operator, "forward_loop", lambda *args: tuple(lowering.forward(*args)))
    monkeypatch.setattr(operator, "backward_loop", lambda *args: tuple(lowering.backward(*args)))


def draw_normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 0.4).to(DEVICE)


def make_problem(cell: type[Cell], num_steps: int, *, batch: int = BATCH) -> tuple[Cell, list[Tensor]]:
    """Returns a core, and the tensors `[*input_seqs, *init_states]` for a call."""
    core = cell(SIZE, draw_normal).to(DEVICE)
    shapes = [(num_steps, batch, SIZE), *[(batch, SIZE)] * core.num_states]
    return core, [draw_normal(*shape).requires_grad_() for shape in shapes]


def run_eagerly(core: Cell, tensors: Sequence[Tensor], target: TargetName, *, state_seqs: bool) -> tuple[Tensor, ...]:
    step, arguments = prepare(ScanProgram(core, 1, core.num_states, 1, on_cpu=target), tensors)
    return scan(step, arguments, state_seqs=state_seqs)


def differentiate(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    weighted = [r * (torch.arange(r.numel(), device=r.device) % 5 - 2).reshape(r.shape) for r in results]
    loss = torch.stack([w.sum() for w in weighted]).sum()
    return [r.detach() for r in results], list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def assert_equal_bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("state_seqs", RUNS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_compiled_cells_equal_eager_mode(cell: type[Cell], state_seqs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loops_by_kernels(monkeypatch, "cpp")
    core, tensors = make_problem(cell, 7)
    leaves = [*tensors, *core.parameters()]
    run = torch.compile(
        partial(RUNS[state_seqs], core, 1, core.num_states, 1), fullgraph=True, backend="aot_eager", dynamic=False
    )
    results, gradients = differentiate(run(*tensors), leaves)
    expected, expected_gradients = differentiate(run_eagerly(core, tensors, "cpp", state_seqs=state_seqs), leaves)
    if bool(((expected[0] == 0) | (expected[0] == 1)).all()):  # the outputs of this cell are spikes
        assert_equal_bits(results[0], expected[0])
    # In one of the graphs, the product adds the bias. In the other graph, a later operation adds it.
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    # Autograd and the gradient graph of the step add the terms of a gradient in different orders.
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_backward_loop_starts_from_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelLowering, "checkpoint_interval", lambda *_: 3)
    loop = backward_loop
    replace_loops_by_kernels(monkeypatch, "cpp")
    monkeypatch.setattr(operator, "backward_loop", loop)
    core, tensors = make_problem(RLIF, 8)
    leaves = [*tensors, *core.parameters()]
    run = torch.compile(
        partial(flex_sn_scan_final_state, core, 1, core.num_states, 1), fullgraph=True, backend="aot_eager"
    )
    actual = differentiate(run(*tensors), leaves)
    expected = differentiate(run_eagerly(core, tensors, "cpp", state_seqs=False), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_autocast_applies_to_products(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loops_by_kernels(monkeypatch, "cpp")
    core, tensors = make_problem(RLIF, 6)
    leaves = [*tensors, *core.parameters()]
    run = torch.compile(partial(flex_sn_scan, core, 1, core.num_states, 1), fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        results = run(*tensors)
        expected = run_eagerly(core, tensors, "cpp", state_seqs=True)
    full_precision = run_eagerly(core, tensors, "cpp", state_seqs=True)
    assert_equal_bits([r.detach() for r in results], [r.detach() for r in expected])
    assert not torch.equal(expected[-1], full_precision[-1])
    actual, expected_gradients = differentiate(results, leaves)[1], differentiate(expected, leaves)[1]
    torch.testing.assert_close(actual, expected_gradients, rtol=1e-2, atol=1e-2)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_interpreted_kernels_equal_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loops_by_kernels(monkeypatch, "triton")
    core, tensors = make_problem(RLIF, 3)
    leaves = [*tensors, *core.parameters()]
    run = torch.compile(
        partial(flex_sn_scan, core, 1, core.num_states, 1), fullgraph=True, backend="aot_eager", dynamic=False
    )
    actual = differentiate(run(*tensors), leaves)
    assert_equal_bits(actual, differentiate(run_eagerly(core, tensors, "triton", state_seqs=True), leaves))


def differentiate_call(
    run: Callable[[Tensor], Tensor], layer: Recurrent, num_steps: int, batch: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the spikes and the gradients of a call that starts without a state."""
    x = (3 * draw_normal(num_steps, batch, SIZE)).requires_grad_()
    layer.reset()
    return differentiate([run(x)], [x, *layer.parameters()])


def check_against_eager_mode(actual: tuple[Any, Any], layer: Recurrent, num_steps: int, batch: int) -> None:
    spikes, gradients = differentiate_call(layer, layer, num_steps, batch)
    assert spikes[0].any()
    assert_equal_bits(actual[0], spikes)
    torch.testing.assert_close(actual[1], gradients, rtol=1e-4, atol=1e-4)


def test_new_sizes_need_no_recompilation() -> None:
    layer = Recurrent(LIF(), SIZE).to(DEVICE)
    run = torch.compile(layer, fullgraph=True, dynamic=True)
    actual, codes = run_and_get_code(differentiate_call, run, layer, 4, BATCH)
    assert [code.count("run_scan.default(") for code in codes] == [1, 1]
    check_against_eager_mode(actual, layer, 4, BATCH)
    with torch.compiler.set_stance("fail_on_recompile"):
        repeated = differentiate_call(run, layer, 11, 5)
    check_against_eager_mode(repeated, layer, 11, 5)


@pytest.mark.long
def test_code_length_does_not_depend_on_the_number_of_steps() -> None:
    layer = Recurrent(LIF(), SIZE).to(DEVICE)
    line_counts = []
    for num_steps in (4, 1000):
        torch._dynamo.reset()
        run = torch.compile(layer, fullgraph=True, dynamic=False)
        actual, codes = run_and_get_code(differentiate_call, run, layer, num_steps, BATCH)
        check_against_eager_mode(actual, layer, num_steps, BATCH)
        line_counts.append([code.count("\n") for code in codes])
    assert line_counts[0] == line_counts[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty graph as a warm-up
@pytest.mark.parametrize("padded", [False, True])
def test_cuda_graph_equals_eager_mode(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor pads products, including products in a step, if that is faster.
    monkeypatch.setattr(torch._inductor.config, "shape_padding", padded)
    monkeypatch.setattr(torch._inductor.config, "force_shape_pad", padded)
    layer = Recurrent(LIF(), 64).cuda()
    x = (3 * torch.randn(20, 6, 64, generator=torch.Generator().manual_seed(3))).cuda().requires_grad_()
    leaves = [x, *layer.parameters()]

    def run_step(run: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        layer.reset()
        torch.compiler.cudagraph_mark_step_begin()
        results, gradients = differentiate([run(x)], leaves)
        return [r.clone() for r in results], [g.clone() for g in gradients]

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, mode="reduce-overhead")
    expected = run_step(layer)
    assert expected[0][0].any()
    for _ in range(4):  # torch warms up, then records a graph, then replays it
        actual = run_step(compiled)
        assert_equal_bits(actual[0], expected[0])
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-4)
