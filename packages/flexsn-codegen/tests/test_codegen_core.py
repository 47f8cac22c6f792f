"""The translation of a graph into the source of a core."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from codegen_cores import graph_of, lif
from torch import Tensor, fx

from flexsn_codegen import (
    GraphError,
    OpCall,
    UnsupportedOpError,
    compile_triton_code_str,
    emit_core,
    generate_triton_code_str,
    pointwise,
    register_op,
    supported_ops,
)
from flexsn_codegen.targets.cpp import CPP
from flexsn_codegen.targets.triton import TRITON
from flexsn_codegen.targets.triton._literals import literal
from flexsn_graph import Port, Role, known_ops, trace_step
from flexsn_graph.ir._ops import _FACTS

_prims = torch.ops.prims


def make_graph(*calls: tuple[Any, tuple[Any, ...], torch.dtype], dtype: torch.dtype = torch.float32) -> fx.Graph:
    """Creates a graph of calls. In their arguments, "x" is the placeholder, and `-i` is the i-th previous call."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, dtype=dtype)
    node = x
    for target, args, result in calls:
        node = graph.call_function(target, tuple(x if a == "x" else a for a in args))
        node.meta["val"] = torch.empty(4, dtype=result)
    graph.output((node,))
    return graph


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.0, torch.float32),
        (-0.0, torch.float32),
        (-0.0, torch.float64),
        (float("inf"), torch.float32),
        (float("-inf"), torch.float64),
        (float("nan"), torch.float32),
        (0.1, torch.float64),
        (0.1, torch.float32),
        (1e-45, torch.float32),
        (5e-324, torch.float64),
        (2**63 - 1, torch.int64),
        (-(2**63), torch.int64),
        (2**64 - 1, torch.uint64),
        (-128, torch.int8),
        (255, torch.uint8),
        (True, torch.bool),
        (False, torch.bool),
    ],
)
def test_literals_keep_value_sign_and_dtype(value: float, dtype: torch.dtype) -> None:
    def constant(x: Tensor) -> Tensor:
        return torch.full_like(x, value, dtype=dtype)

    result = pointwise(constant)(torch.zeros(3))
    expected = torch.full((3,), value, dtype=dtype)
    assert result.dtype == dtype
    if dtype.is_floating_point:
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(result), torch.signbit(expected)) or value != value
    else:
        assert torch.equal(result, expected)


def test_literals_of_halves_are_float32_in_registers() -> None:
    assert literal(0.5, torch.bfloat16) == "tl.full([], 0.5, tl.float32)"


def test_name_is_an_identifier_with_a_hash() -> None:
    source, name = generate_triton_code_str(graph_of(lif, torch.zeros(4), torch.zeros(4)), "a b/../c;1")
    assert re.fullmatch(r"a_b____c_1_[0-9a-f]{12}", name)
    assert f"def {name}(" in source
    assert compile_triton_code_str(source, name) is not None


@pytest.mark.parametrize("name", ["", "class", "1st", "tl", "dev", "é", "__x", "a" * 500, "x\ny", "'\"\\"])
def test_hostile_names_compile(name: str) -> None:
    source, full = generate_triton_code_str(graph_of(lif, torch.zeros(4), torch.zeros(4)), name)
    assert full.isidentifier()
    assert full.isascii()
    assert len(full) < 120
    assert compile_triton_code_str(source, full) is not None


def test_arguments_may_have_the_names_of_the_modules() -> None:
    graph = graph_of(lambda a, b, c: torch.exp(a) + b * c, *torch.zeros(3, 4), names=("tl", "dev", "triton"))
    core = emit_core(graph, "core", prune=True)
    assert "(_tl, _dev, _triton):" in core.source
    assert "_tl" in core.source.splitlines()[2]


def test_long_names_with_equal_beginnings_differ() -> None:
    long = "n" * 200
    graph = graph_of(lambda a, b: a - b, torch.zeros(4), torch.zeros(4), names=(long + "1", long + "2"))
    assert f"({long}1, {long}2):" in emit_core(graph, "core", prune=False).source


def test_hash_depends_on_the_code_and_not_on_its_file() -> None:
    first, second, other = (make_graph((_prims.mul.default, ("x", k), torch.float32)) for k in (2.0, 2.0, 3.0))
    node = next(n for n in second.nodes if n.op == "call_function")
    node.stack_trace = '  File "/somewhere/model.py", line 12, in step\n    y = x * 2.0  # doubled'
    plain, cited, third = (emit_core(g, "core", prune=True) for g in (first, second, other))
    assert cited.name == plain.name != third.name
    assert "# model.py:12: y = x * 2.0 # doubled" in cited.source
    assert "/somewhere" not in cited.source


def test_citation_cannot_leave_its_comment() -> None:
    graph = make_graph((_prims.mul.default, ("x", 2.0), torch.float32))
    node = next(n for n in graph.nodes if n.op == "call_function")
    node.stack_trace = '  File "/x/a\rimport os.py", line 1, in f\n    y = x\r    raise SystemExit\x0c'
    source, name = generate_triton_code_str(graph, "core")
    assert "raise SystemExit" in source
    compile_triton_code_str(source, name)


def test_unused_arguments_are_pruned_on_request() -> None:
    graph = graph_of(lambda x, y, z: x * z, *torch.zeros(3, 4), names=("a", "b", "c"))
    core = emit_core(graph, "core", prune=True)
    assert core.arguments == (Port(Role.INPUT, 0), Port(Role.INPUT, 2))
    assert "(a, c):" in core.source
    assert "(a, b, c):" in emit_core(graph, "core", prune=False).source


def test_result_may_be_a_constant_or_an_argument() -> None:
    def results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x, dtype=torch.int32), y

    ones, same = pointwise(results)(torch.zeros(3), torch.arange(3))
    assert torch.equal(ones, torch.ones(3, dtype=torch.int32))
    assert torch.equal(same, torch.arange(3))


def test_constant_node_is_written_at_its_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    two = graph.call_function(_prims.scalar_tensor.default, (2.0,), {"dtype": torch.float32})
    product = graph.call_function(_prims.mul.default, (x, two))
    for node in (x, product):
        node.meta["val"] = torch.empty(4)
    two.meta["val"] = torch.empty(())
    graph.output((product,))
    assert "mul_default = x * tl.full([], 2.0, tl.float32)" in emit_core(graph, "core", prune=True).source


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_constant_of_a_narrow_dtype_is_rounded(dtype: torch.dtype) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, dtype=dtype)
    tenth = graph.call_function(_prims.scalar_tensor.default, (0.1,), {"dtype": dtype})
    tenth.meta["val"] = torch.empty((), dtype=dtype)
    wide = graph.call_function(_prims.convert_element_type.default, (tenth, torch.float32))
    wide.meta["val"] = torch.empty(())
    total = graph.call_function(_prims.add.default, (wide, 0.0))
    total.meta["val"] = torch.empty(())
    graph.output((total, tenth))
    source = emit_core(graph, "core", prune=True).source
    assert source.count(f"dev.round_{str(dtype)[6:]}(tl.full([], 0.1, tl.float32))") == 2


def test_equal_graphs_have_equal_sources() -> None:
    first, second = (generate_triton_code_str(graph_of(lif, torch.zeros(4), torch.zeros(4)), "core") for _ in range(2))
    assert first == second


def test_unsupported_op_is_named_with_the_users_line() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.special.airy_ai(x) + x  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedOpError, match=r"aten\.special_airy_ai\.default") as caught:
        pointwise(function)(torch.zeros(3))
    assert caught.value.op == "aten.special_airy_ai.default"
    assert f"{__file__}:" in str(caught.value)
    assert "return torch.special.airy_ai(x) + x" in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_node_without_dtype_is_refused() -> None:
    graph = make_graph((_prims.mul.default, ("x", 2.0), torch.float32))
    next(n for n in graph.nodes if n.op == "call_function").meta.clear()
    with pytest.raises(GraphError, match=r"node mul_default .* no fake tensor"):
        emit_core(graph, "core", prune=True)


def test_complex_result_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="complex64"):
        emit_core(make_graph((_prims.mul.default, ("x", 2.0), torch.complex64)), "core", prune=True)


def test_graph_that_returns_nothing_or_numbers_is_refused() -> None:
    empty, number = fx.Graph(), fx.Graph()
    empty.output(())
    number.output((1.0,))
    with pytest.raises(GraphError, match="returns nothing"):
        emit_core(empty, "core", prune=True)
    with pytest.raises(GraphError, match=r"returns 1\.0"):
        emit_core(number, "core", prune=True)


def test_python_function_in_the_graph_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="not an ATen or custom op"):
        emit_core(make_graph((torch.relu, ("x",), torch.float32)), "core", prune=True)


def test_register_op_adds_a_rule_and_supported_ops_lists_it() -> None:
    @torch.library.custom_op("codegen_test::spike", mutates_args=())
    def spike(x: Tensor, width: float, kind: str) -> Tensor:
        return (x.abs() < width).to(x.dtype)

    @spike.register_fake
    def _(x: Tensor, width: float, kind: str) -> Tensor:
        return torch.empty_like(x)

    overload = torch.ops.codegen_test.spike.default
    x = torch.linspace(-2, 2, 9)

    def function(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.codegen_test.spike(x * 2, 1.5, "box")
        return result

    assert overload not in supported_ops()
    assert "codegen_test" not in str(pointwise(function).traced(x).step.graph), "without a rule, what it is made of"
    calls: list[OpCall] = []
    try:

        @register_op(overload, exact=True)
        def rule(call: OpCall) -> str:
            calls.append(call)
            x, width = call.operands
            return f"tl.where(tl.abs({x}) < {width}, {call.number(1.0)}, {call.number(0.0)})"

        assert overload in supported_ops()
        assert torch.equal(pointwise(function)(x), function(x))
    finally:
        TRITON.rules.pop(overload, None)
        _FACTS.pop(overload, None)
    assert calls[0].constants == (None, 1.5)
    assert calls[0].keywords == {"kind": "box"}


def test_every_op_with_facts_has_a_rule() -> None:
    assert supported_ops() == known_ops()


def test_op_that_torch_decomposes_is_kept_if_it_has_a_rule() -> None:
    overload, x = torch.ops.aten.celu.default, torch.linspace(-2, 2, 9)
    try:

        @register_op(overload)
        def rule(call: OpCall) -> str:
            (x,) = call.operands
            return f"tl.where({x} > {call.number(0.0)}, {x}, dev.expm1({x}))"

        kernel = pointwise(torch.celu)
        assert "aten.celu.default" in str(kernel.traced(x).step.graph)
        torch.testing.assert_close(kernel(x), torch.celu(x))
    finally:
        TRITON.rules.pop(overload, None)
        _FACTS.pop(overload, None)


def test_supported_ops_are_sorted() -> None:
    names = [str(op) for op in supported_ops()]
    assert names == sorted(names)
    assert "prims.add.default" in names


def test_verbose_prints_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = generate_triton_code_str(graph_of(lif, torch.zeros(4), torch.zeros(4)), "core", verbose=True)
    assert capsys.readouterr().out.strip() == source.strip()


def test_slow_ops_on_captured_tensors_are_a_separate_function() -> None:
    w, scale = torch.tensor([0.25, 0.5]), torch.tensor([2.0, 3.0])

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.sigmoid(w * scale)  # an exponential, and a division that is the only user of the exponential
        h = v * decay + x * torch.sqrt(scale) + torch.exp(x) + w * scale
        return h, h

    trace = trace_step(core, 1, 1, 1, [torch.zeros(2), torch.zeros(2)])
    source = emit_core(trace.forward, "step", prune=True, once=True, target=CPP)
    assert source.once is not None
    before = source.once.core
    assert source.once.dtypes == (torch.float32, torch.float32)  # the division and the root
    assert set(before.arguments) == {Port(Role.LIFTED, 0), Port(Role.LIFTED, 1)}
    earlier, step = (re.sub("//.*", "", text) for text in (before.source, source.source))
    assert earlier.count("dev::exp(") == earlier.count(" / ") == earlier.count("sqrt(") == 1
    assert step.count("dev::exp(") == 1, "only the exponential of the input remains in the step"
    assert "sqrt(" not in step
    assert " / " not in step
    assert step.count("lifted_0 * lifted_1") == 1, "products that are as fast as a load remain in the step"
    assert emit_core(trace.forward, "step", prune=True, target=CPP).once is None


def test_no_op_is_hoisted_if_all_depend_on_the_step() -> None:
    trace = trace_step(lambda x, v: (x, torch.exp(v) / 3.0), 1, 1, 1, [torch.zeros(2), torch.zeros(2)])
    assert emit_core(trace.forward, "step", prune=True, once=True, target=CPP).once is None
