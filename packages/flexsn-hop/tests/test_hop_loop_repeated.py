"""The loop that Inductor calls runs all operations of a step in every step of every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hop_alone import no_kernels  # noqa: F401  a fixture
from scan_steps import looped, loss
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn_hop import scan
from flexsn_hop.text import read_graph, write_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # of torch.cond
]

Step = Callable[[Any, Any], tuple[Any, Any]]
I = torch.tensor([0, 2, 2])  # noqa: E741
PERMUTED = torch.tensor([2, 0, 1])


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def assert_three_calls_are_equal(
    step: Step, init: Tensor, xs: Tensor, captured: Tensor | None = None, backend: str = "inductor"
) -> None:
    """Checks that three equal calls of a compiled scan have the values and gradients of the loop."""
    init, xs = (t.requires_grad_() if t.is_floating_point() else t for t in (init, xs))
    leaves = [t for t in (init, xs, captured) if t is not None and t.requires_grad]

    def values_and_gradients(run: Callable[..., Any]) -> Any:
        results = run(init, xs)
        return results, torch.autograd.grad(loss(results), leaves, materialize_grads=True, allow_unused=True)

    expected = values_and_gradients(lambda init, xs: looped(step, init, xs))
    compiled = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True, backend=backend)
    for call in range(3):
        actual = values_and_gradients(compiled)
        torch.testing.assert_close(actual, expected, msg=partial("call {}: {}".format, call))


def assigned(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(3, dtype=h.dtype)
    y[0] = h[0] * x[1]
    y[1:] = x[:2] * h[1:]
    z = h.clone()
    z[I] = x
    return y.sin() + 0.1 * h, z


def create_tensors(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.full((3,), 0.5, dtype=h.dtype)
    y.mul_(h)
    z = torch.arange(3, dtype=h.dtype)
    z[0] = x[1]
    c = torch.tensor([1.0, 2.0, 3.0], dtype=h.dtype)
    c += x
    return y + h.new_ones(3).index_add_(0, I, x), z * c


STEPS: dict[str, Step] = {
    "index": lambda h, x: (h[PERMUTED] * x.cos(), h[I] * x),
    "index_select": lambda h, x: (h * x + h.index_select(0, I), None),
    "take": lambda h, x: (h.take(I) * x, None),
    "gather": lambda h, x: (h.gather(0, I) * x, None),
    "unfold": lambda h, x: (h * 0.5 + F.pad(x * h, (1, 1)).unfold(0, 3, 1).sum(-1), None),
    "index_add_": lambda h, x: (h + torch.zeros(4, dtype=h.dtype).index_add_(0, I, h * x)[:3], None),
    "scatter_": lambda h, x: (h * x.new_zeros(3).scatter_(0, PERMUTED, h), x.new_ones(3).scatter_add(0, I, h * x)),
    "assigned": assigned,
    "create_tensors": create_tensors,
}


@pytest.mark.long(all_but=["create_tensors"])
@pytest.mark.parametrize("name", STEPS)
def test_equal_calls_are_equal(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    init, xs = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3,), (4, 3)))
    assert_three_calls_are_equal(STEPS[name], init, xs)


def test_table_has_the_gradient_of_the_loop() -> None:
    table = torch.ones(3, requires_grad=True, dtype=torch.float64)
    init = torch.zeros(1, dtype=torch.float64)
    assert_three_calls_are_equal(lambda h, t: (h + table[t], None), init, torch.tensor([[0], [1], [1]]), table)


# -- graphs as text ------------------------------------------------------------------------------------------------


def various(x: Tensor) -> Any:
    buffer = torch.full((3,), float("inf"), dtype=torch.float32).nan_to_num(posinf=1.0)
    buffer.index_put_((PERMUTED,), x, accumulate=True)
    constant = torch.tensor([[1.0, 2.0, 4.0]])
    constant[0, 1:] = x[:2]
    values, _ = x.sort(descending=True)
    return buffer, constant, values, x * (1 + 2j), x.to(torch.device("cpu"), torch.float16), x[::2], torch.eye(3)


def test_graph_is_equal_after_writing_and_reading() -> None:
    x = torch.tensor([0.5, -1.0, 3.0])
    graph = make_fx(various)(x)
    read = read_graph(write_graph(graph))
    for _ in range(3):
        torch.testing.assert_close(read(x), various(x), rtol=0, atol=0)
    names = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    actual = [node.target for node in read.graph.nodes if node.op == "call_function"]
    assert [name for name in actual if name is not torch.ops.aten.clone.default] == names


def test_constants_are_not_changed_by_a_step() -> None:
    graph = torch.fx.Graph()
    constant = graph.get_attr("constant")
    result = graph.call_function(torch.ops.aten.add_.Tensor, (constant, graph.placeholder("x")))
    graph.output((result,))
    module = torch.fx.GraphModule({"constant": torch.zeros(2, 0, 3)}, graph)
    assert read_graph(write_graph(module))(torch.ones(3))[0].shape == (2, 0, 3)
    module.constant = torch.tensor([[1.0, float("nan")]])
    read = read_graph(write_graph(module))
    for _ in range(3):
        torch.testing.assert_close(read(torch.ones(()))[0], torch.tensor([[2.0, float("nan")]]), equal_nan=True)


# -- solvers and control flow -----------------------------------------------------------------------------------------

LinAlgError: type[Exception] = vars(torch.linalg)["LinAlgError"]
while_loop: Any = torch._higher_order_ops.while_loop


def make_matrix(x: Tensor) -> Tensor:
    return 2 * torch.eye(3, dtype=x.dtype) + torch.diag(x * x)


def halved(c: Tensor, x: Tensor) -> Tensor:
    start = torch.tensor(0), c.detach() + x.detach()
    result: Tensor = while_loop(lambda n, _: n < 3, lambda n, v: (n + 1, v / 2), start)[1]
    return result


LARGE_STEPS: dict[str, Step] = {
    "solve": lambda c, x: (torch.linalg.solve(make_matrix(x), c + x), None),
    "inv": lambda c, x: (torch.linalg.inv(make_matrix(x)) @ c, c * x),
    "cholesky": lambda c, x: (torch.linalg.cholesky(make_matrix(x)) @ c / 3, None),
    "det": lambda c, x: (torch.linalg.det(make_matrix(x)) * c / 9, torch.linalg.slogdet(make_matrix(x)).logabsdet),
    "scan": lambda c, x: (scan(lambda a, b: (torch.tanh(a + b), a * b), c, x[:, None].expand(3, 3))[1].mean(0), None),
    "solve in scan": lambda c, x: (
        scan(lambda a, b: (torch.linalg.solve(make_matrix(b), a), None), c, x[:, None].expand(3, 3))[0] + c,
        None,
    ),
    "cond": lambda c, x: (torch.cond(c.sum() > 0, lambda c, x: c + x.sin(), lambda c, x: c - x * c, (c, x)), None),
    "while_loop": lambda c, x: (halved(c, x) + 0.5 * c, None),
    "item": lambda c, x: (c * 0.5 + x[0].item() * x, None),
}


@pytest.mark.long(all_but=["solve-inductor"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LARGE_STEPS)
def test_solvers_and_control_flow_equal_the_loop(name: str, backend: str) -> None:
    draw = torch.Generator().manual_seed(0)
    init, xs = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3,), (4, 3)))
    # Numbers that a step reads have no gradient.
    assert_three_calls_are_equal(LARGE_STEPS[name], init, xs, backend=backend)


def test_checks_of_linalg_run_in_each_step() -> None:
    def solve(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.linalg.solve(torch.diag(x), c), None

    ones = torch.ones(3)
    try:
        torch.compile(solve, fullgraph=True, backend="aot_eager")(ones, 0 * ones)
        pytest.skip("this version of torch compiles without the checks of torch.linalg")
    except LinAlgError:
        pass
    xs = torch.ones(4, 3)
    compiled = torch.compile(lambda xs: scan(solve, ones, xs)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(xs), ones)
    xs[2, 1] = 0.0
    with pytest.raises(LinAlgError, match="singular"):
        compiled(xs)
