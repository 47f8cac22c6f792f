"""Tracing depends only on the core and the examples, and has no side effects."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from graph_cores import CASES, PLIF, Case, lif_core
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsn_graph import StepTrace, _torch_private, generate_forward_and_backward_graph, trace_step


def make_zeros() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3), torch.zeros(2, 3)


def format_trace(trace: StepTrace) -> str:
    count = len(trace.inputs) + len(trace.states) + len(trace.lifted)
    vjp = trace.vjp([True] * len(trace.differentiable), [True] * count)
    return f"{trace.forward.graph}\n{trace.forward.layouts}\n{vjp.graph}\n{vjp.layouts}\n{vjp.gradients}"


def format_graphs() -> str:
    """Returns the graphs of one core of each kind, as text."""
    graphs = [format_trace(trace_step(case.core, *case.counts, case.arguments())) for case in CASES[::3]]
    pair = generate_forward_and_backward_graph(PLIF(torch.zeros(3)), make_zeros())
    return "\n".join([*graphs, *map(str, pair)])


PLAIN = lif_core()


@pytest.mark.long(all_but=["lif_custom_op", "alif", "if"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traces_of_one_core_have_equal_graphs(case: Case) -> None:
    first, second = (format_trace(trace_step(case.core, *case.counts, case.arguments())) for _ in range(2))
    assert first == second


def test_graphs_are_equal_in_every_process() -> None:
    code = "from test_graph_isolation import format_graphs; print(format_graphs())"
    source = Path(sys.modules["flexsn_graph"].__file__ or "").parents[1]
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{source}", "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert other.strip() == format_graphs().strip()
    assert "grad_output_0" in other


@pytest.mark.long(all_but=["alif", "lif_hard"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trace_inside_of_a_backward_cites_the_same_lines(case: Case) -> None:
    """Traces in the same way as a runtime that compiles the backward at its first use."""
    stack_traces: list[list[str | None]] = []

    def note() -> None:
        trace = trace_step(case.core, *case.counts, case.arguments())
        count = len(trace.inputs) + len(trace.states) + len(trace.lifted_values)
        vjp = trace.vjp([True] * len(trace.differentiable), [True] * count)
        stack_traces.append([node.stack_trace for graph in (trace.forward.graph, vjp.graph) for node in graph.nodes])

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            note()
            return grad

    note()
    for _ in range(2):  # autograd's counter of nodes is different in the second iteration
        x = torch.zeros(3, requires_grad=True)
        thread = threading.Thread(target=Inside.apply(x * 2.0).sum().backward)
        thread.start()
        thread.join()
    assert len(stack_traces) == 3
    assert stack_traces[1] == stack_traces[2] == stack_traces[0]
    assert any("line" in (trace or "") for trace in stack_traces[0])


def test_examples_are_neither_changed_nor_kept() -> None:
    x, v = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    before = x.detach().clone(), v.clone()
    trace = trace_step(PLAIN, 1, 1, 1, (x, v))
    trace.vjp([True, True], [True, True])
    assert torch.equal(x, before[0])
    assert torch.equal(v, before[1])
    assert x.grad is None
    assert x.requires_grad
    assert not v.requires_grad
    references = [weakref.ref(x), weakref.ref(v)]
    del x, v, before
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_captured_parameters_are_not_touched() -> None:
    core = PLIF(torch.randn(3))
    before, version = core.w.detach().clone(), core.w._version
    trace_step(core, 1, 1, 1, make_zeros()).vjp([True, True], [True] * 3)
    assert torch.equal(core.w, before)
    assert core.w._version == version
    assert core.w.grad is None
    assert type(core.w) is torch.nn.Parameter


def test_examples_need_no_data() -> None:
    core = PLIF(torch.zeros(3))
    expected = format_trace(trace_step(core, 1, 1, 1, make_zeros()))
    meta = torch.empty(2, 3, device="meta")
    assert format_trace(trace_step(core, 1, 1, 1, (meta, meta))) == expected
    with FakeTensorMode():
        fake, gpu = torch.empty(2, 3), torch.empty(2, 3, device="cuda")
        assert format_trace(trace_step(core, 1, 1, 1, (fake, fake))) == expected
    assert format_trace(trace_step(core, 1, 1, 1, (fake, fake))) == expected
    # The machine needs no GPU. PLAIN has no parameter, because a parameter on the CPU would rightly be refused here.
    assert format_trace(trace_step(PLAIN, 1, 1, 1, (gpu, gpu))) == format_trace(
        trace_step(PLAIN, 1, 1, 1, make_zeros())
    )


def test_huge_examples_need_no_memory() -> None:
    huge = torch.empty(2**20, 2**20, device="meta")
    assert trace_step(PLAIN, 1, 1, 1, (huge, huge)).step_shape == (2**20, 2**20)


def test_strided_examples_have_an_equal_graph() -> None:
    x = torch.zeros(3, 2).t()
    expected = format_trace(trace_step(PLAIN, 1, 1, 1, make_zeros()))
    assert format_trace(trace_step(PLAIN, 1, 1, 1, (x, torch.zeros(1, 1).expand(2, 3)))) == expected


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_modes_around_the_trace_have_no_effect() -> None:
    core = PLIF(torch.zeros(3))
    expected = format_trace(trace_step(core, 1, 1, 1, make_zeros()))
    examples = make_zeros()
    with torch.no_grad():
        assert format_trace(trace_step(core, 1, 1, 1, examples)) == expected
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert format_trace(trace_step(core, 1, 1, 1, examples)) == expected
        assert torch.is_inference_mode_enabled()
    with torch.autograd.set_detect_anomaly(True):
        assert format_trace(trace_step(core, 1, 1, 1, examples)) == expected
        assert torch.is_anomaly_enabled()
    with torch.device("meta"):
        assert format_trace(trace_step(core, 1, 1, 1, examples)) == expected
    assert torch.is_grad_enabled()


def test_only_autocast_inside_the_core_applies() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Autocast runs this function in float32.
        return torch.nn.functional.huber_loss(x, v, reduction="none"), v

    def inside(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return core(x, v)

    x, v = torch.zeros(2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert core(x, v)[0].dtype == torch.float32
        assert trace_step(core, 1, 1, 1, (x, v)).outputs[0].dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert trace_step(inside, 1, 1, 1, (x, v)).outputs[0].dtype == torch.float32


def test_environment_is_restored_after_an_error() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("mine")

    with torch.no_grad(), pytest.raises(RuntimeError, match="mine"):
        trace_step(core, 1, 1, 1, make_zeros())
    assert torch.is_grad_enabled()
    assert torch.zeros(3).sum().item() == 0.0, "a mode is still active"


def test_core_is_traced_while_torch_traces_an_op() -> None:
    """Traces a core in the fake implementation of a custom op, while torch traces the op."""
    expected = format_trace(trace_step(PLAIN, 1, 1, 1, make_zeros()))
    inner_graphs: list[str] = []

    def outer(x: Tensor) -> Tensor:
        inner_graphs.append(format_trace(trace_step(PLAIN, 1, 1, 1, (x, x))))
        return x + 1.0

    graph = torch.fx.experimental.proxy_tensor.make_fx(outer, tracing_mode="fake")(torch.zeros(2, 3)).graph
    assert inner_graphs == [expected]
    assert len([n for n in graph.nodes if n.op == "call_function"]) == 1


def test_several_threads_can_trace_at_once() -> None:
    expected = format_trace(trace_step(PLAIN, 1, 1, 1, make_zeros()))
    results: list[str] = []

    def work() -> None:
        for _ in range(3):
            results.append(format_trace(trace_step(PLAIN, 1, 1, 1, make_zeros())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 12


def test_trace_outlives_the_callers_core() -> None:
    trace = trace_step(lif_core(), 1, 1, 1, make_zeros())
    gc.collect()
    assert trace.vjp([True, True], [True, True]).gradients == (0, 1)


def test_both_generators_are_deterministic() -> None:
    core = PLIF(torch.zeros(3))
    first, second = (generate_forward_and_backward_graph(core, make_zeros()) for _ in range(2))
    assert [str(g) for g in first] == [str(g) for g in second]


def test_memory_of_torch_for_constants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "_MOST_FAKE_RESULTS", len(_torch_private._fake_results) + 8)
    most = 0
    for number in range(12):
        trace_step(lambda x, v, k=1.0 / (3 + number): (x * k, v * k), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
        most = max(most, len(_torch_private._fake_results))
    assert len(_torch_private._fake_results) < most
