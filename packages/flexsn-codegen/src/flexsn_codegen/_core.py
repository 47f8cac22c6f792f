"""From an FX graph to the source of one `@triton.jit` function on blocks of values."""

from __future__ import annotations

import hashlib
import keyword
import operator
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_codegen._dtypes import is_supported, literal
from flexsn_codegen._functions import FAST
from flexsn_codegen._numerics import Numerics, Precision
from flexsn_codegen._rules import OpCall, expression, half_rounded
from flexsn_codegen._torch_private_ops import OpOverload
from flexsn_codegen.errors import GraphError, UnsupportedOpError
from flexsn_graph import Port, Role, StepGraph, continuous_nodes, location_of, ports

HEADER = """import triton
import triton.language as tl

from flexsn_codegen import device as dev
"""

_LITERAL_OPS = {torch.ops.aten.scalar_tensor.default, torch.ops.prims.scalar_tensor.default}
_MAX_NAME = 80
# What generated sources mean by these names.
_RESERVED = {"dev", "float", "tl", "triton"}
_Number = bool | int | float


@dataclass(frozen=True, slots=True)
class CoreSource:
    """The function that computes one step.

    Attributes:
        name: the function's name.
        source: its text, `@triton.jit` included, imports (`HEADER`) not.
        arguments: what the function takes, in order.
        results: what it returns, in order.
    """

    name: str
    source: str
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]


def generate_triton_code_str(
    graph: fx.Graph,
    fn_name: str,
    verbose: bool = False,
    *,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> tuple[str, str]:
    """Writes a graph as a `@triton.jit` function on blocks of values.

    Args:
        graph: pointwise, in the closed op set, with a fake tensor on each node (`node.meta["val"]`), as
            `flexsn_graph` makes them.
        fn_name: any text; what is not allowed in an identifier becomes `_`.
        verbose: prints the source.
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` rounds the function's results alone.
        fast_math: call approximate functions. To be compiled with `compile_options(..., fast_math=True)`.

    Returns:
        The source of a module, and the function's name: `fn_name` plus a hash of the body. The function
        takes a block for each placeholder and returns a block for each of the graph's results. Half
        values are float32 there.

    Raises:
        UnsupportedOpError: an op has no rule; names it and the user's line.
        GraphError: a node has no dtype, or the graph returns something else than nodes.
        PrecisionError: an unknown `precision`.
    """
    core = emit_core(graph, fn_name, prune=False, precision=precision, fast_math=fast_math)
    code = f"{HEADER}\n\n{core.source}"
    if verbose:
        print(code)
    return code, core.name


def emit_core(
    graph: StepGraph | fx.Graph,
    fn_name: str,
    *,
    prune: bool,
    precision: Precision = "eager",
    fast_math: bool = False,
    fast_division: bool = False,
) -> CoreSource:
    """Like `generate_triton_code_str`, without imports.

    Args:
        graph: of a plain one, all arguments are inputs and all results are outputs.
        prune: leave out arguments that are not used.
        precision, fast_math: as for `generate_triton_code_str`.
        fast_division: divide to 2 ulp where the quotient reaches the results through continuous ops alone. The
            rounded division has a rare slow path, a branch, around which nothing is scheduled.
    """
    numerics = Numerics(precision, fast_math)
    step = graph if isinstance(graph, StepGraph) else _as_step(graph)
    graph = step.graph
    placeholders = step.placeholders
    taken = {port: _name(n) for port, n in placeholders.items() if n.users or not prune}
    if not taken:
        # A result that is a constant needs a block to take its shape from.
        taken = {port: _name(placeholders[port]) for port in step.arguments[:1]}
    arguments = tuple(taken.values())
    loose = continuous_nodes(graph) if fast_division else frozenset()
    statements = [n for n in graph.nodes if n.op == "call_function" and not _is_inlined(n)]
    fast = [FAST if fast_math else ("div",) if n in loose else () for n in statements]
    lines = [_statement(n, numerics, f) for n, f in zip(statements, fast, strict=True)]
    lines.append(f"return {_results(graph, arguments, numerics)}")
    code = "\n".join(line for line, _ in (_split(line) for line in lines))
    digest = hashlib.sha256(f"{arguments}\n{code}".encode()).hexdigest()[:12]
    name = f"{identifier(fn_name)}_{digest}"
    body = "\n".join(f"    {line}" for line in lines)
    source = f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}\n"
    return CoreSource(name, source, tuple(taken), step.results)


def _as_step(graph: fx.Graph) -> StepGraph:
    """A graph from inputs to outputs."""
    inputs = ports(Role.INPUT, len(graph.find_nodes(op="placeholder")))
    return StepGraph(graph, inputs, ports(Role.OUTPUT, len(_entries(graph))), {})


def _entries(graph: fx.Graph) -> list[Any]:
    """What the graph returns; `None` is nothing."""
    results: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    entries = results if isinstance(results, list | tuple) else (results,)
    return [entry for entry in entries if entry is not None]


def identifier(text: str, limit: int | None = _MAX_NAME) -> str:
    """`text` as a Python identifier, of limited length: it also becomes a file name."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)[:limit] or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) or name in _RESERVED else name


def _split(line: str) -> tuple[str, str]:
    """A line without its citation: moving the user's code in its file must not make another kernel."""
    code, _, comment = line.partition("  # ")
    return code, comment


def _name(node: fx.Node) -> str:
    return identifier(node.name, limit=None)  # cut off, two names could become one


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise GraphError(
            f"node {node.name} ({node.target}) has no fake tensor in meta['val']: its dtype is unknown. "
            "Trace with flexsn_graph, or with make_fx on fake tensors."
        )
    if not is_supported(value.dtype):
        raise UnsupportedOpError(
            f"{node.target} returns {value.dtype}, which Triton does not have{location_text(node)}",
            str(node.target),
        )
    return value.dtype


def location_text(node: fx.Node) -> str:
    """The user's line, as the end of an error message; empty where it is not known."""
    where = location_of(node)
    return "" if where is None else f"\n  at {where.file}:{where.line}: {where.code}"


def _citation(node: fx.Node) -> str:
    """`file.py:12: code`, for a comment; the file's name alone, so that it is the same on every machine."""
    where = location_of(node)
    if where is None:
        return ""
    # On one line whatever the names hold: the text ends up in a comment.
    return " ".join(f"{os.path.basename(where.file)}:{where.line}: {where.code}".split())


def _is_inlined(node: fx.Node) -> bool:
    """Numbers are written where they are used; of several results, each is a statement (`getitem`)."""
    return node.target in _LITERAL_OPS or isinstance(node.meta.get("val"), list | tuple)


def _statement(node: fx.Node, numerics: Numerics, fast: Sequence[str]) -> str:
    call = _op_call(node)
    try:
        text = expression(call, rounded=numerics.precision == "eager", fast=fast)
    except UnsupportedOpError as error:
        raise UnsupportedOpError(f"{error}{location_text(node)}", error.op) from None
    where = _citation(node)
    return f"{_name(node)} = {text}" + (f"  # {where}" if where else "")


def _op_call(node: fx.Node) -> OpCall:
    result = _dtype(node)
    index = 0
    if node.target is operator.getitem:
        node, index = node.args  # type: ignore[assignment]
    target: Any = node.target
    if not isinstance(target, OpOverload):
        raise UnsupportedOpError(f"{target} is not an ATen or custom op{location_text(node)}", str(target))
    values = [a for a in node.args if isinstance(a, fx.Node | _Number)]
    if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
        raise UnsupportedOpError(f"{target} takes a tensor by keyword{location_text(node)}", str(target))
    schema = target._schema.arguments
    others = {schema[i].name: a for i, a in enumerate(node.args) if not isinstance(a, fx.Node | _Number)}
    # The condition of `where` is the only operand of another dtype; its branches tell.
    typed = values[1:] if target is torch.ops.prims.where.default else values
    dtype = next((_dtype(v) for v in typed if isinstance(v, fx.Node)), result)
    return OpCall(
        op=target,
        operands=tuple(_operand(v, dtype) for v in values),
        constants=tuple(None if isinstance(v, fx.Node) else v for v in values),
        dtype=dtype,
        result=result,
        index=index,
        keywords={**others, **node.kwargs},
    )


def _operand(value: fx.Node | _Number, dtype: torch.dtype) -> str:
    if not isinstance(value, fx.Node):
        return literal(value, dtype)
    return _literal(value) if value.target in _LITERAL_OPS else _name(value)


def _literal(node: fx.Node) -> str:
    value: Any = node.args[0]
    return half_rounded(literal(value, _dtype(node)), _dtype(node))


def _results(graph: fx.Graph, arguments: Sequence[str], numerics: Numerics) -> str:
    texts = [_result(entry, arguments, numerics) for entry in _entries(graph)]
    if not texts:
        raise GraphError("the graph returns nothing: there is no kernel to make of it.")
    return ", ".join(texts)


def _result(entry: Any, arguments: Sequence[str], numerics: Numerics) -> str:
    if not isinstance(entry, fx.Node):
        raise GraphError(f"the graph returns {entry!r}; only results of nodes become tensors.")
    if entry.target not in _LITERAL_OPS:
        # An argument has its dtype's values already, and so has all else when each op was rounded.
        computed = numerics.precision == "float32" and entry.op != "placeholder"
        return half_rounded(_name(entry), _dtype(entry)) if computed else _name(entry)
    if not arguments:
        raise GraphError("the graph takes no tensor and returns a constant: its shape is unknown.")
    return f"tl.broadcast_to({_literal(entry)}, {arguments[0]}.shape)"
