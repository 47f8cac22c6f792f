"""``torch.compile`` captures the operator as one node, whose results equal those of the eager scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from hop_cores import (
    CASES,
    SPIKES,
    Case,
    function_spike,
    lif_core,
    plif_core,
    smooth_spike,
    value_and_gradients,
)
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter

from flexsn_hop import (
    dynamo_hop_available,
    eager_scan,
    eager_scan_final_state,
    flex_sn_scan,
    flex_sn_scan_final_state,
)

pytestmark = [
    # Torch's own tests have this recording backend.
    pytest.mark.filterwarnings("ignore:.*doesn't take boxed arguments:UserWarning"),
]

Run = Callable[..., Any]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
pairs = pytest.mark.parametrize(
    ("scan", "reference"),
    [(flex_sn_scan, eager_scan), (flex_sn_scan_final_state, eager_scan_final_state)],
    ids=["sequence", "final"],
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def compile_run(run: Run, backend: Any = "aot_eager", dynamic: bool | None = None) -> Run:
    return torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)


def assert_same(actual: Run, expected: Run, arguments: Sequence[torch.Tensor], *, exact_values: bool = True) -> None:
    values, gradients = value_and_gradients(actual, arguments)
    wanted_values, wanted_gradients = value_and_gradients(expected, arguments)
    if exact_values:
        torch.testing.assert_close(values, wanted_values, rtol=0, atol=0)
    else:
        torch.testing.assert_close(values, wanted_values)
    torch.testing.assert_close(gradients, wanted_gradients)


def test_dynamo_can_capture_here() -> None:
    assert dynamo_hop_available() is True


@pytest.mark.long(all_but=["function-sequence-alif", "detach-final-two_by_two"])
@cases
@pytest.mark.parametrize(
    ("spike", "scan", "reference"),
    [
        ("function", flex_sn_scan, eager_scan),
        ("detach", flex_sn_scan_final_state, eager_scan_final_state),
    ],
    ids=["function-sequence", "detach-final"],
)
def test_compiled_scan_equals_the_eager_scan(case: Case, spike: str, scan: Run, reference: Run) -> None:
    core = case.make(SPIKES[spike])
    assert_same(
        compile_run(functools.partial(scan, core, *case.counts)),
        functools.partial(reference, core, *case.counts),
        case.arguments(5),
    )


@pytest.mark.long(all_but=["sequence-33", "final-1"])
@pytest.mark.parametrize("steps", [1, 2, 33])
@pairs
def test_sequences_of_other_lengths_equal_the_eager_scan(steps: int, scan: Run, reference: Run) -> None:
    case = CASES[-1]
    core = case.make(function_spike)
    assert_same(
        compile_run(functools.partial(scan, core, *case.counts)),
        functools.partial(reference, core, *case.counts),
        case.arguments(steps),
    )


@pytest.mark.long(all_but=["differentiated0", "differentiated2", "differentiated3"])
@pytest.mark.parametrize("differentiated", [[0], [1], [2], [0, 2], []])
def test_only_required_gradients_are_computed(differentiated: list[int]) -> None:
    case = CASES[5]
    core = case.make(function_spike)
    arguments = case.arguments(4, requires_grad=False)
    for index in differentiated:
        arguments[index].requires_grad_()
    backend = AotEagerAndRecordGraphs()
    run = compile_run(functools.partial(flex_sn_scan, core, *case.counts), backend)
    if not differentiated:
        torch.testing.assert_close(run(*arguments), eager_scan(core, *case.counts, *arguments))
        assert backend.bw_graphs == []
        return
    assert_same(run, functools.partial(eager_scan, core, *case.counts), arguments)
    (node,) = find_nodes(backend.bw_graphs[0], "flex_sn_scan_backward")
    assert node.kwargs["needs"] == tuple(index in differentiated for index in range(3))


def test_absent_gradient_is_not_computed_with() -> None:
    case = CASES[-1]
    core = case.make(function_spike)

    def first_output(run: Run) -> Run:
        return lambda *flat: run(core, *case.counts, *flat)[:1]

    backend = AotEagerAndRecordGraphs()
    assert_same(compile_run(first_output(flex_sn_scan), backend), first_output(eager_scan), case.arguments(4))
    (node,) = find_nodes(backend.bw_graphs[0], "flex_sn_scan_backward")
    assert node.kwargs["output_grads"] == (True, False)
    assert node.kwargs["state_grads"] == (False, False)


def test_state_may_need_a_gradient_only_after_the_first_step() -> None:
    # In the first step, the spike depends only on the initial state, which needs no gradient.
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = function_spike(v - 0.5)
        return s, 0.8 * v * (1 - s) + x

    x, v = torch.randn(6, 4, requires_grad=True), torch.randn(4)
    assert_same(
        compile_run(functools.partial(flex_sn_scan, core, 1, 1, 1)),
        functools.partial(eager_scan, core, 1, 1, 1),
        [x, v],
    )


def test_gradients_reach_a_chain_of_states_one_step_after_another() -> None:
    def core(x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, count = states
        return c * 1.0, x * 2, function_spike(a) + a, b * a, count + 1

    x = torch.randn(6, 4, requires_grad=True)
    states = [torch.randn(4) for _ in range(3)] + [torch.zeros(4, dtype=torch.int64)]
    backend = AotEagerAndRecordGraphs()
    assert_same(
        compile_run(functools.partial(flex_sn_scan, core, 1, 4, 1), backend),
        functools.partial(eager_scan, core, 1, 4, 1),
        [x, *states],
    )
    (node,) = find_nodes(backend.bw_graphs[0], "flex_sn_scan_backward")
    assert node.kwargs["active_states"] == (True, True, True, False)


def test_outputs_without_a_gradient_do_not_require_grad() -> None:
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + x
        hard = (h > 0).to(h)
        return hard, h > 0, h, h * 0.5

    x, v = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    hard, fired, h, last = compile_run(flex_sn_scan)(core, 1, 1, 3, x, v)
    assert not hard.requires_grad
    assert fired.dtype == torch.bool
    assert h.requires_grad
    assert last.requires_grad
    assert_same(
        compile_run(functools.partial(flex_sn_scan, core, 1, 1, 3)),
        functools.partial(eager_scan, core, 1, 1, 3),
        [x, v],
    )


def test_constant_state_has_no_gradient() -> None:
    def core(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return v * w, torch.zeros_like(v), x * w

    x, v, w = torch.randn(3, 4), torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    _, constant, state = compile_run(flex_sn_scan)(core, 1, 2, 1, x, v, w)
    assert not constant.requires_grad
    assert state.requires_grad
    assert_same(
        compile_run(functools.partial(flex_sn_scan_final_state, core, 1, 2, 1)),
        functools.partial(eager_scan_final_state, core, 1, 2, 1),
        [x, v, w],
    )


def test_core_without_differentiable_results_has_no_gradients() -> None:
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x + v).detach() * 2, v + 1

    x, v = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    output, states = compile_run(functools.partial(flex_sn_scan, core, 1, 1, 1))(x, v)
    assert not output.requires_grad
    torch.testing.assert_close((output, states), eager_scan(core, 1, 1, 1, x, v))


@pytest.mark.long(all_but=["sequence-view", "sequence-swapped", "final-swapped"])
@pytest.mark.parametrize(
    "core",
    [
        lambda x, v: (x, v),
        lambda x, v: (v, x),
        lambda x, v: (x + v,) * 2,
        lambda x, v: ((x + v).t(), x.clone()),
    ],
    ids=["passthrough", "swapped", "same", "view"],
)
@pairs
def test_aliased_results_equal_the_eager_scan(core: Run, scan: Run, reference: Run) -> None:
    arguments = [torch.randn(4, 3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)]
    assert_same(
        compile_run(functools.partial(scan, core, 1, 1, 1)),
        functools.partial(reference, core, 1, 1, 1),
        arguments,
    )


def test_in_place_operations_on_local_values_are_allowed() -> None:
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = v + x
        h.mul_(0.5).add_(x)
        return h.clone(), h

    arguments = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    assert_same(
        compile_run(functools.partial(flex_sn_scan, core, 1, 1, 1)),
        functools.partial(eager_scan, core, 1, 1, 1),
        arguments,
    )


def test_inputs_that_are_not_contiguous_equal_the_eager_scan() -> None:
    case = CASES[5]
    core = case.make(function_spike)
    x, v, w = case.arguments(3)

    def run(scan: Run) -> Run:
        return lambda x, v, w: scan(core, *case.counts, x.permute(1, 0, 2), v, w.expand(3, 3)[0])

    arguments = [x.detach().permute(1, 0, 2).contiguous().requires_grad_(), v, w]
    assert_same(compile_run(run(flex_sn_scan)), run(eager_scan), arguments)


def test_gradients_of_lifted_tensors_are_summed_to_their_shapes() -> None:
    def core(x: torch.Tensor, v: torch.Tensor, *lifted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scalar, channel, element = lifted
        h = v * scalar + x * channel + element
        return h.tanh(), h

    arguments = [
        torch.randn(5, 2, 3),
        torch.randn(2, 3),
        torch.tensor(0.5),
        torch.randn(3),
        torch.randn(2, 1),
    ]
    for argument in arguments:
        argument.requires_grad_()
    assert_same(
        compile_run(functools.partial(flex_sn_scan, core, 1, 1, 1)),
        functools.partial(eager_scan, core, 1, 1, 1),
        arguments,
    )


def test_captured_values_have_gradients() -> None:
    core = plif_core(function_spike)

    def run(scan: Run) -> Run:
        def network(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
            gate = torch.tanh(w) + x.mean()
            return scan(lambda x, v: core(x, v, gate), 1, 1, 1, 2 * x, v)

        return network

    assert_same(compile_run(run(flex_sn_scan)), run(eager_scan), CASES[5].arguments(5))


class ParametricCore(torch.nn.Module):
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.7]))
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return plif_core(function_spike)(x + self.offset, v, self.weight)

    def as_method(self, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.forward(x, v)


@pytest.mark.long(all_but=["method"])
@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_modules_methods_and_partials_can_be_cores(form: str) -> None:
    module = ParametricCore()
    cores: dict[str, Any] = {
        "module": module,
        "method": module.as_method,
        "partial": functools.partial(plif_core(function_spike), w=module.weight),
    }
    core = cores[form]
    x, v = torch.randn(5, 2, 3), torch.randn(2, 3)

    def gradient(run: Run) -> torch.Tensor:
        outputs, states = run(core, 1, 1, 1, x, v)
        return torch.autograd.grad(outputs.sum() + states.square().sum(), [module.weight])[0]

    expected = gradient(eager_scan)
    assert expected.abs().min() > 0
    torch.testing.assert_close(gradient(flex_sn_scan), expected)
    torch.testing.assert_close(gradient(compile_run(flex_sn_scan)), expected)


@pytest.mark.long
def test_network_of_several_layers_is_one_graph() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, scan: Run) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.neuron = ParametricCore()
            self.scan = scan

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scan(self.neuron, 1, 1, 1, self.linear(x), torch.zeros(2, 3))[0]  # type: ignore[no-any-return]

    def network(scan: Run) -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(Layer(scan), Layer(scan), torch.nn.Linear(3, 1))

    backend = AotEagerAndRecordGraphs()
    plain, operator = network(eager_scan), network(flex_sn_scan)
    x = torch.randn(6, 2, 3)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    run = compile_run(operator, backend)
    actual = torch.autograd.grad(run(x).sum(), list(operator.parameters()))
    torch.testing.assert_close(actual, expected)
    assert len(find_nodes(backend.fw_graphs[0], "flex_sn_scan")) == 2
    assert len(find_nodes(backend.bw_graphs[0], "flex_sn_scan_backward")) == 2


def find_nodes(graph: torch.fx.GraphModule, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if str(node.target) == name]


def measure_graphs(backend: AotEagerAndRecordGraphs) -> list[int]:
    """Returns the number of nodes of each graph, including its nested graphs."""
    return [
        sum(len(module.graph.nodes) for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
        for graphs in (backend.graphs, backend.fw_graphs, backend.bw_graphs)
        for graph in graphs
    ]


@pytest.mark.long(all_but=["final"])
@pairs
def test_graphs_do_not_grow_with_time(scan: Run, reference: Run) -> None:
    case = CASES[5]
    core = case.make(function_spike)
    sizes = []
    for steps in (3, 1000):
        torch._dynamo.reset()
        backend = AotEagerAndRecordGraphs()
        run = compile_run(functools.partial(scan, core, *case.counts), backend, dynamic=False)
        arguments = case.arguments(steps)
        torch.autograd.grad(sum(r.sum() for r in run(*arguments)), arguments)
        sizes.append(measure_graphs(backend))
        assert len(find_nodes(backend.graphs[0], "flex_sn_scan")) == 1
        assert len(find_nodes(backend.fw_graphs[0], "flex_sn_scan")) == 1
        assert len(find_nodes(backend.bw_graphs[0], "flex_sn_scan_backward")) == 1
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 3


@pytest.mark.long(all_but=["sequence-mark", "final-dynamic"])
@pytest.mark.parametrize("marking", ["mark", "dynamic"])
@pairs
def test_all_lengths_and_batch_sizes_need_one_compilation(marking: str, scan: Run, reference: Run) -> None:
    case = CASES[5]
    core = case.make(function_spike)
    counter = CompileCounter()
    run = compile_run(functools.partial(scan, core, *case.counts), counter, True if marking == "dynamic" else None)
    for steps, batch in ((5, 2), (9, 7), (33, 4)):
        arguments = case.arguments(steps, (batch, 3))
        if marking == "mark":
            torch._dynamo.mark_dynamic(arguments[0], 0)
            torch._dynamo.mark_dynamic(arguments[0], 1)
            torch._dynamo.mark_dynamic(arguments[1], 0)
        torch.testing.assert_close(run(*arguments), reference(core, *case.counts, *arguments))
    assert counter.frame_count == 1


@pytest.mark.long(all_but=["sequence"])
@pairs
def test_captured_sizes_and_floats_may_be_dynamic(scan: Run, reference: Run) -> None:
    def network(run: Run) -> Run:
        def call(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, tau: float) -> Any:
            batch = x.shape[1]
            gate = w * x.mean()

            def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                h = v + (x - v) / tau + batch * gate
                return function_spike(h - 1), h

            return run(core, 1, 1, 1, x, v)

        return call

    operator = compile_run(network(scan), dynamic=True)
    for steps, batch, tau in ((5, 2, 2.0), (9, 7, 3.5)):
        assert_same(
            lambda *flat, tau=tau: operator(*flat, tau),
            lambda *flat, tau=tau: network(reference)(*flat, tau),
            CASES[5].arguments(steps, (batch, 3)),
        )


@pairs
def test_empty_scan_equals_the_eager_scan(scan: Run, reference: Run) -> None:
    core = lif_core(function_spike, hard_reset=True, detach_reset=False)
    specs = [((2,), torch.float16, torch.device("cpu"))]
    run = compile_run(functools.partial(scan, core, 1, 1, 1, output_template_specs=specs))
    x, v = torch.zeros(0, 2), torch.randn(2, requires_grad=True)
    expected = reference(core, 1, 1, 1, x, v, output_template_specs=specs)
    torch.testing.assert_close(run(x, v), expected, rtol=0, atol=0)
    # One compiled function works for empty and other scans.
    x = torch.randn(3, 2)
    torch.testing.assert_close(run(x, v), reference(core, 1, 1, 1, x, v))


def test_gradients_pass_gradcheck() -> None:
    core = plif_core(smooth_spike)
    arguments = CASES[5].arguments(3, (2, 3), torch.float64)
    for scan in (flex_sn_scan, flex_sn_scan_final_state):
        run = compile_run(functools.partial(scan, core, 1, 1, 1))
        assert torch.autograd.gradcheck(run, arguments)


def test_compiled_scan_without_gradients_equals_the_eager_scan() -> None:
    case = CASES[5]
    core = case.make(function_spike)
    arguments = case.arguments(5)
    for guard in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with guard():
            run = compile_run(functools.partial(flex_sn_scan, core, *case.counts))
            results = run(*arguments)
            expected = eager_scan(core, *case.counts, *arguments)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        assert not any(result.requires_grad for result in results)


def test_states_that_start_from_one_tensor_are_independent() -> None:
    def core(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        charged = 0.5 * a + x
        return torch.sin(b), charged, 0.7 * b + charged * a

    def run(scan: Run, x: torch.Tensor, start: torch.Tensor) -> Any:
        return scan(core, 1, 2, 1, x, start, start)

    arguments = [torch.rand(5, 4, dtype=torch.float64, requires_grad=True), torch.rand(4, dtype=torch.float64)]
    actual = compile_run(functools.partial(run, flex_sn_scan_final_state))
    assert_same(actual, functools.partial(run, eager_scan_final_state), arguments)
