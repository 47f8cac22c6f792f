"""In graphs, `scan` is one node for each direction, equals the loop, and has the errors of uncompiled calls."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from scan_steps import (
    RECURRENCES,
    MinimalGRU,
    draw,
    float_leaves,
    kalman,
    looped,
    loss,
    moving_average,
    parameters_of,
    recurrence,
)
from test_hop_scan import MISTAKES, Pair, Span, list_containers
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from flexsn_hop import errors, scan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*doesn't take boxed arguments:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
]

Scan = Callable[..., tuple[Any, Any]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def count_nodes(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(str(node.target) == name for node in graph.graph.nodes)


def count_all_nodes(graph: torch.fx.GraphModule) -> int:
    return sum(len(module.graph.nodes) for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


@pytest.mark.long(all_but=["minimal_gru"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_compiled_scan_is_one_node_for_each_direction(name: str) -> None:
    sizes = []
    for steps in (3, 40):
        torch._dynamo.reset()
        case = recurrence(name, steps)
        leaves = [leaf.requires_grad_() for leaf in float_leaves((case.init, case.xs))] + parameters_of(case.step)
        backend = AotEagerAndRecordGraphs()
        run = functools.partial(scan, case.step, **case.options)
        results = torch.compile(run, fullgraph=True, backend=backend, dynamic=False)(case.init, case.xs)
        expected = looped(case.step, case.init, case.xs, **case.options)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        gradients = torch.autograd.grad(loss(results), leaves)
        torch.testing.assert_close(gradients, torch.autograd.grad(loss(expected), leaves))
        graphs = [backend.graphs[0], backend.fw_graphs[0], backend.bw_graphs[0]]
        assert [count_nodes(graph, "flex_sn_scan") for graph in graphs] == [1, 1, 0]
        assert [count_nodes(graph, "flex_sn_scan_backward") for graph in graphs] == [0, 0, 1]
        sizes.append([count_all_nodes(graph) for graph in graphs])
    assert sizes[0] == sizes[1]


def test_all_lengths_need_one_compilation() -> None:
    counter = CompileCounter()
    run = torch.compile(functools.partial(scan, kalman, reverse=True), fullgraph=True, backend=counter, dynamic=True)
    for steps in (6, 9, 33):
        case = recurrence("kalman", steps)
        expected = looped(kalman, case.init, case.xs, reverse=True)
        torch.testing.assert_close(run(case.init, case.xs), expected)
    assert counter.frame_count == 1


def test_length_may_depend_on_data() -> None:
    def powers(run_scan: Scan, x: Tensor, length: Any) -> Any:
        torch._check(length >= 1)
        return run_scan(lambda power, _: (power * x, power), torch.ones_like(x), length=length)

    x = draw(3).requires_grad_()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(lambda x, n: powers(scan, x, n.item()), fullgraph=True, backend="aot_eager")
        results, expected = run(x, torch.tensor(4)), powers(looped, x, 4)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(torch.autograd.grad(loss(results), x), torch.autograd.grad(loss(expected), x))


def test_length_may_be_a_symbolic_size() -> None:
    def powers(run_scan: Scan, x: Tensor) -> Any:
        return run_scan(lambda power, _: (power * 0.5, power), x[0], length=x.shape[0] + 1)

    counter = CompileCounter()
    run = torch.compile(functools.partial(powers, scan), fullgraph=True, backend=counter)
    for steps in (5, 9, 33):
        x = draw(steps, 3)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), powers(looped, x))
    assert counter.frame_count == 1


@pytest.mark.long(all_but=["symbolic"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_node_for_each_scan(mode: Any) -> None:
    def run(run_scan: Scan, init: Tensor, x: Tensor, decay: Tensor) -> Any:
        rate = decay.sigmoid()
        init, _ = run_scan(lambda c, _: (c + rate, None), init, length=x.shape[0])
        return run_scan(lambda c, x: (c * rate + x, {"y": c.sum()}), init, x, reverse=True)

    sizes = []
    for steps in (3, 40):
        arguments = (draw(3), draw(steps, 3), draw(3))
        graph = make_fx(functools.partial(run, scan), tracing_mode=mode)(*arguments)
        assert count_nodes(graph, "flex_sn_scan") == 2
        torch.testing.assert_close(graph(*arguments), run(looped, *arguments))
        sizes.append(count_all_nodes(graph))
    assert sizes[0] == sizes[1]


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = MinimalGRU()

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h, ys = self.cell(h, x)
        return h, {"h": ys["h"]}

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return scan(self.step, h, x, dim=1)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 issues this warning
@pytest.mark.long(all_but=["False"])
@pytest.mark.parametrize("strict", [True, False])
def test_exported_program_accepts_every_length(strict: bool) -> None:
    network, h = Network(), draw(2, 4)
    time = torch.export.Dim("time", min=2, max=4096)
    arguments = (h, draw(2, 3, 3))
    program = torch.export.export(network, arguments, strict=strict, dynamic_shapes=(None, {1: time}))
    assert count_nodes(program.graph_module, "flex_sn_scan") == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for steps in (2, 9):
        x = draw(2, steps, 3)
        torch.testing.assert_close(loaded(h, x), looped(network.step, h, x, dim=1))


class OverTime(torch.nn.Module):
    """A PyTorch cell whose operator checks sizes in C++."""

    def __init__(self, kind: Callable[[int, int], torch.nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(3, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: tuple[Tensor, ...], x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            state = self.cell(x, state) if len(state) == 2 else (self.cell(x, state[0]),)
            return state, state[0].sum(-1)

        zeros = x.new_zeros(x.shape[1], 4)
        init: tuple[Tensor, ...] = (zeros, zeros) if isinstance(self.cell, torch.nn.LSTMCell) else (zeros,)
        (last, *_), ys = scan(step, init, x)
        return last, ys


@pytest.mark.long(all_but=["True-GRUCell"])
@pytest.mark.parametrize(
    "kind", [torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("strict", [True, False])
def test_exported_cells_accept_every_batch_size(strict: bool, kind: type[torch.nn.RNNCellBase]) -> None:
    """Checks that a symbolic size remains symbolic, although operators of recurrent cells compare sizes."""
    sizes = {0: torch.export.Dim("time", min=2), 1: torch.export.Dim("batch", min=2)}
    network = OverTime(kind)
    program = torch.export.export(network, (draw(6, 5, 3),), strict=strict, dynamic_shapes=(sizes,))
    x = draw(9, 2, 3)
    torch.testing.assert_close(program.module()(x), network(x))


def test_changed_options_are_compiled_again() -> None:
    """Tests options that change between calls. Dynamo makes such numbers symbolic, but they determine the graph."""

    def run(x: Tensor, dim: int, remat: int) -> Any:
        return scan(lambda h, x: (torch.tanh(h + x), h * x), x.select(dim, 0), x, dim=dim, remat=remat)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = draw(3, 4, 5).requires_grad_()
    for dim, remat in ((0, 1), (1, 2), (2, 3), (-2, 4)):
        (last, ys), expected = compiled(x, dim, remat), run(x, dim, remat)
        torch.testing.assert_close((last, ys), expected)
        gradients = [torch.autograd.grad(carry.sum(), x) for carry in (last, expected[0])]
        torch.testing.assert_close(*gradients)


@pytest.mark.long(all_but=["minimal_gru"])
@pytest.mark.parametrize("name", ["minimal_gru", "counting"])
def test_inductor_equals_the_loop(name: str) -> None:
    case = recurrence(name, 5)
    leaves = [leaf.requires_grad_() for leaf in float_leaves((case.init, case.xs))] + parameters_of(case.step)
    run = torch.compile(functools.partial(scan, case.step, **case.options), fullgraph=True)
    results = run(case.init, case.xs)
    expected = looped(case.step, case.init, case.xs, **case.options)
    torch.testing.assert_close(results, expected)
    gradients = torch.autograd.grad(loss(results), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(expected), leaves))


def test_compiled_scan_of_no_steps_equals_the_eager_scan() -> None:
    case = recurrence("minimal_gru", 0)
    run = torch.compile(functools.partial(scan, case.step, **case.options), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(case.init, case.xs), scan(case.step, case.init, case.xs, **case.options))
    nothing = torch.compile(lambda v: scan(lambda c, _: (c * 2, c.sum()), v, length=0), backend="aot_eager")
    carry, ys = nothing(draw(3))
    torch.testing.assert_close(carry, draw(3))
    assert ys.shape == (0,)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda c, x: ((c[0] + x,), x), errors.CarryStructureError),
        (lambda c, x: ([(c[0] + x).half()], x), errors.StateChangedError),
        (lambda c, x: ([(c[0] + x).sum()], x), errors.StateChangedError),
        (lambda c, x: [c[0] + x], errors.CoreReturnCountError),
        (lambda c, x: ([c[0] + x], 3), errors.NotATensorError),
    ],
)
def test_scans_of_no_steps_have_the_errors_of_other_scans(step: Any, error: type[Exception]) -> None:
    def run(init: Tensor, xs: Tensor) -> Any:
        return scan(step, [init], xs)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    messages = set()
    for function in (run, compiled):
        for steps in (0, 2):
            with pytest.raises(error) as raised:
                function(draw(3), draw(steps, 3))
            messages.add(str(raised.value).split("\n", maxsplit=1)[0])
    assert len(messages) == 1


@pytest.mark.long(all_but=["int32"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16], ids=["bool", "int32", "float16"])
def test_scan_of_no_steps_keeps_dtypes(dtype: torch.dtype) -> None:
    init, x = torch.zeros(3, dtype=dtype), torch.zeros(3, 0, dtype=dtype)

    def run(init: Tensor, x: Tensor) -> Any:
        return scan(lambda c, x: (c.logical_or_(x).to(dtype), (x, x + c)), init, x, dim=1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(init, x), run(init, x))


@pytest.mark.long(all_but=["Span"])
@pytest.mark.parametrize("kind", [Pair, Span])
def test_containers_of_users_equal_the_loop(kind: Any) -> None:
    for name, step, init, xs in list_containers(kind):
        results = torch.compile(functools.partial(scan, step), fullgraph=True, backend="aot_eager")(init, xs)
        expected = looped(step, init, xs)
        assert tree_structure(results) == tree_structure(expected)
        torch.testing.assert_close(tree_leaves(results), tree_leaves(expected), rtol=0, atol=0, msg=name)


# Torch's forward mode scripts its own formulas.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_in_compiled_code_equal_the_loop() -> None:
    init = draw(3)

    def network(run_scan: Scan, x: Tensor) -> Tensor:
        return loss(run_scan(moving_average, init, x))

    def everything(run_scan: Scan, x: Tensor, row: Tensor) -> Any:
        run = functools.partial(network, run_scan)
        twice = grad(lambda x: grad(run)(x).square().sum())(row)
        return vmap(run)(x), vmap(grad(run))(x), jvp(run, (row,), (row.cos(),)), twice

    arguments = draw(2, 4, 3), draw(4, 3)
    run = torch.compile(functools.partial(everything, scan), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(*arguments), everything(looped, *arguments))


# These errors depend on data, so they are not raised while a graph is created, or they cause a graph break.
ONLY_EAGER = {"y of another shape", "y of another structure", "a nested tensor"}


@pytest.mark.long(all_but=["structure", "shape", "lengths", "no length", "dim of ys", "arity", "no pair"])
@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake not in ONLY_EAGER])
def test_mistakes_are_named(mistake: str) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        torch.compile(call, fullgraph=True, backend="aot_eager")()


def test_random_numbers_and_writes_are_refused() -> None:
    def noisy(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry + torch.rand_like(x), x

    with pytest.raises(errors.RandomOpError, match=r"draws random numbers \(File .*test_hop_scan_compile.py"):
        torch.compile(functools.partial(scan, noisy), fullgraph=True, backend="aot_eager")(draw(3), draw(4, 3))

    def writing(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry.add_(x), x

    with pytest.raises(Exception, match="utation"):
        torch.compile(functools.partial(scan, writing), fullgraph=True, backend="aot_eager")(draw(3), draw(4, 3))


@pytest.mark.long
def test_network_with_several_scans_equals_the_loop() -> None:
    cells, init = [MinimalGRU(3, 4), MinimalGRU(4, 4)], draw(2, 4)

    def network(run_scan: Scan, x: Tensor) -> Tensor:
        for cell in cells:
            _, ys = run_scan(cell, init, x.movedim(-1, 0) if cell is cells[0] else x)
            x = ys["h"]
        return loss(x)

    x = draw(2, 3, 5).requires_grad_()
    leaves = [x, *(leaf for cell in cells for leaf in parameters_of(cell))]
    run = torch.compile(functools.partial(network, scan), fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(run(x), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(network(looped, x), leaves))


def test_trees_made_in_compiled_code_equal_the_loop() -> None:
    def run(run_scan: Scan, x: Tensor) -> Any:
        init = {"a": (x[0], None), "b": [x[1] * 2]}
        carry, ys = run_scan(
            lambda c, x: ({"b": [c["b"][0] + x["u"]], "a": (c["a"][0] * 0.5, None)}, (None, [c["a"][0], x["v"]])),
            init,
            {"u": x, "v": x.long()},
        )
        return tree_map(lambda leaf: leaf, carry["a"][0]), carry["b"], ys

    x = draw(5, 3)
    compiled = torch.compile(functools.partial(run, scan), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(looped, x))
