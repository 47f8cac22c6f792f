"""Turns a graph into the source of a function that computes one step on blocks of values."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_codegen.core._once import computed_once, needed_for
from flexsn_codegen.core._representable import needs_rounding
from flexsn_codegen.errors import GraphError, UnsupportedOpError
from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._numbers import LITERAL_OPS, Number, may_be_argument
from flexsn_codegen.source._numerics import Numerics, Precision
from flexsn_codegen.source._source import CoreSource, Once, identifier
from flexsn_codegen.targets import Approximate, OpCall, Statement, Target
from flexsn_codegen.targets._base import Op
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import Port, Role, StepGraph, ancestors, continuous_nodes, location_of, ports

_Number = bool | int | float


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
        graph: a graph of pointwise ops for which Triton has rules, such as a graph that `flexsn_graph` has traced. Each
            node has a fake tensor in `node.meta["val"]`.
        fn_name: start of the function's name. Any text is accepted: characters that are not allowed in an identifier
            become `_`.
        verbose: prints the source.
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` rounds only the function's results.
        fast_math: True to use approximate functions and divisions. Compile the source with
            `compile_options(..., fast_math=True)`.

    Returns:
        The source of a module, and the name of its function, which is `fn_name` followed by a hash of the body. The
        function takes a block for each placeholder and returns a block for each of the graph's results. In these
        blocks, float16 and bfloat16 values are float32.

    Raises:
        UnsupportedOpError: an op has no rule. The message names the op and the user's line.
        GraphError: a node has no dtype, the graph returns no result, a result is not a node, or a result is a constant
            and the graph takes no tensor.
        PrecisionError: `precision` is unknown.
    """
    core = emit_core(graph, fn_name, prune=False, precision=precision, fast_math=fast_math)
    code = f"{core.target.header}\n\n{core.source}"
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
    numbers: str | None = None,
    once: bool = False,
    target: Target = TRITON,
) -> CoreSource:
    """Writes a graph as a function in the language of a target. The source has no imports.

    Args:
        graph: a step graph or a plain FX graph. All arguments of a plain graph are inputs, and all of its results are
            outputs.
        fn_name: see `generate_triton_code_str`.
        prune: True to leave out unused arguments.
        precision, fast_math: see `generate_triton_code_str`.
        fast_division: True to divide with an error of up to 2 ulp if the quotient reaches the results only through
            continuous ops. The exact division has a branch to a rare slow path, and no instruction can be scheduled
            across this branch.
        numbers: prefix of the names of arguments that replace the graph's numbers. With such arguments, graphs that
            only differ in numbers have equal sources. Numbers that determine how an op is written, such as an exponent
            of 2 or the degree of a polynomial, stay in the source. If `None`, all numbers stay in the source.
        once: True to make a separate function for values that are slow to compute and equal in all steps
            (`CoreSource.once`).
        target: the target for which the source is written.
    """
    numerics = Numerics(precision, fast_math)
    step = graph if isinstance(graph, StepGraph) else _as_step(graph)
    placeholders = step.placeholders
    used = {port: n for port, n in placeholders.items() if n.users or not prune}
    if not used:
        # Keeps one argument, because the shape of its block is the shape of constant results.
        used = {port: placeholders[port] for port in step.arguments[:1]}
    writer = _StepWriter(target, numerics, continuous_nodes(step.graph) if fast_division else frozenset(), numbers)
    arguments = [writer.name(node) for node in used.values()]
    hoisted = computed_once(step) if once else ()
    nodes = [n for n in step.graph.nodes if n.op == "call_function" and not _is_inlined(n)]
    statements = {node: writer.statement(node) for node in nodes}
    results = writer.results(step.graph, arguments)
    number_names = [number.name for number in writer.numbers]
    # The hash excludes citations. Otherwise, the kernel would be compiled again if the user's code moved in its file.
    code = "\n".join([*(f"{s.name} = {s.text}" for s in statements.values()), f"return {', '.join(results)}"])
    digest = hashlib.sha256(f"{(*arguments, *number_names)}\n{code}".encode()).hexdigest()[:12]
    name = f"{identifier(fn_name, reserved=target.reserved)}_{digest}"
    once_function = None
    if hoisted:
        lifted = {port: node for port, node in used.items() if port.role is Role.LIFTED}
        earlier = ancestors(hoisted)
        once_arguments = [*map(writer.name, lifted.values()), *number_names]
        returned = {writer.name(node): node.meta["val"].dtype for node in hoisted}
        once_function = _write_once(
            target, once_arguments, tuple(lifted), [statements[n] for n in nodes if n in earlier], returned
        )
        needed = needed_for(step, set(hoisted))
        nodes = [node for node in nodes if node in needed and node not in hoisted]
        number_names += returned
    source = target.function(name, [*arguments, *number_names], [statements[node] for node in nodes], results)
    return CoreSource(name, source, tuple(used), step.results, target, tuple(writer.numbers), once_function)


def _write_once(
    target: Target,
    arguments: Sequence[str],
    lifted: tuple[Port, ...],
    statements: Sequence[Statement],
    results: dict[str, torch.dtype],
) -> Once:
    """Writes the function of the values that are equal in all steps. A step and its VJP often share this function."""
    code = "\n".join(f"{s.name} = {s.text}" for s in statements)
    digest = hashlib.sha256(f"{tuple(arguments)}\n{code}\n{list(results)}".encode()).hexdigest()[:12]
    name = f"once_{digest}"
    source = target.function(name, arguments, statements, list(results))
    return Once(CoreSource(name, source, lifted, (), target), tuple(results.values()))


def _as_step(graph: fx.Graph) -> StepGraph:
    """Makes a step of a plain graph: the graph's arguments become inputs, and the graph's results become outputs."""
    inputs = ports(Role.INPUT, len(graph.find_nodes(op="placeholder")))
    return StepGraph(graph, inputs, ports(Role.OUTPUT, len(_list_entries(graph))), {})


def _list_entries(graph: fx.Graph) -> list[Any]:
    """The results of the graph that are not `None`."""
    results: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    entries = results if isinstance(results, list | tuple) else (results,)
    return [entry for entry in entries if entry is not None]


def location_text(node: fx.Node) -> str:
    """The user's line as text for the end of an error message. Empty if the line is unknown."""
    where = location_of(node)
    return "" if where is None else f"\n  at {where.file}:{where.line}: {where.code}"


def _cite(node: fx.Node) -> str:
    """The text `file.py:12: code` for a comment. The folder is omitted, so that the text is equal on every machine."""
    where = location_of(node)
    if where is None:
        return ""
    # The citation is a comment, so it has to be a single line, even if the file's name contains a line break.
    return " ".join(f"{os.path.basename(where.file)}:{where.line}: {where.code}".split())


def _is_inlined(node: fx.Node) -> bool:
    """True for nodes without a statement: numbers, which are written where they are used, and ops with several results.

    Each result of an op with several results has a `getitem` node, whose statement computes the result.
    """
    return node.target in LITERAL_OPS or isinstance(node.meta.get("val"), list | tuple)


class _StepWriter:
    """Writes the nodes of a graph in the language of a target.

    Attributes:
        numbers: the numbers that have become arguments so far.
    """

    def __init__(
        self, target: Target, numerics: Numerics, loose: Collection[fx.Node], prefix: str | None = None
    ) -> None:
        self._target = target
        self._numerics = numerics
        self._loose = loose  # nodes whose division may be approximate
        self._prefix = prefix
        self._literals: dict[fx.Node, str] = {}
        self.numbers: list[Number] = []

    def name(self, node: fx.Node) -> str:
        # The length is not limited, because two truncated names could be equal.
        return identifier(node.name, limit=None, reserved=self._target.reserved)

    def statement(self, node: fx.Node) -> Statement:
        call = self._make_call(node)
        loose = Approximate.DIVISION if node in self._loose else Approximate.NOTHING
        approximate = Approximate.EVERYTHING if self._numerics.fast_math else loose
        try:
            rounded = self._numerics.precision == "eager" and needs_rounding(
                node, number_arguments=self._prefix is not None
            )
            text = self._target.expression(call, rounded=rounded, approximate=approximate)
        except UnsupportedOpError as error:
            raise UnsupportedOpError(f"{error}{location_text(node)}", error.op) from None
        return Statement(self.name(node), text, _cite(node))

    def results(self, graph: fx.Graph, arguments: Sequence[str]) -> list[str]:
        texts = [self._write_result(entry, arguments) for entry in _list_entries(graph)]
        if not texts:
            raise GraphError("the graph returns nothing, so there is nothing to compute.")
        return texts

    def _make_call(self, node: fx.Node) -> OpCall:
        result = self._get_dtype(node)
        index = 0
        if node.target is operator.getitem:
            node, index = node.args  # type: ignore[assignment]
        op: Any = node.target
        if not isinstance(op, Op):
            raise UnsupportedOpError(f"{op} is not an ATen or custom op{location_text(node)}", str(op))
        values = [a for a in node.args if isinstance(a, fx.Node | _Number)]
        if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
            raise UnsupportedOpError(f"{op} takes a tensor by keyword{location_text(node)}", str(op))
        schema = op._schema.arguments
        keywords = {schema[i].name: a for i, a in enumerate(node.args) if not isinstance(a, fx.Node | _Number)}
        # All tensor operands of an op have the same dtype, except for the condition of `where`.
        typed = values[1:] if op is torch.ops.prims.where.default else values
        dtype = next((self._get_dtype(v) for v in typed if isinstance(v, fx.Node)), result)
        constants = [None if isinstance(v, fx.Node) else v for v in values]
        operands = [self._write_node(v) if isinstance(v, fx.Node) else self._target.literal(v, dtype) for v in values]
        computed: dict[int, Callable[[Callable[[float], float]], str]] = {}
        if self._prefix is not None:
            for i, value in enumerate(constants):
                if value is not None and may_be_argument(op, i, value, dtype):
                    operands[i], constants[i] = self._add_argument(value, dtype), None
                    computed[i] = partial(self._add_computed, value, dtype)
        return OpCall(
            op=op,
            operands=tuple(operands),
            constants=tuple(constants),
            dtype=dtype,
            result=result,
            target=self._target,
            index=index,
            keywords={**keywords, **node.kwargs},
            computed=computed,
        )

    def _add_argument(self, value: bool | int | float, dtype: torch.dtype) -> str:
        """Turns a number into an argument of the function, and returns the argument's name."""
        number = Number(f"{self._prefix}_number_{len(self.numbers)}", register_dtype(dtype), value)
        self.numbers.append(number)
        return number.name

    def _add_computed(self, value: float, dtype: torch.dtype, function: Callable[[float], float]) -> str:
        return self._add_argument(function(value), dtype)

    def _get_dtype(self, node: fx.Node) -> torch.dtype:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise GraphError(
                f"node {node.name} ({node.target}) has no fake tensor in meta['val'], so its dtype is unknown. "
                "Trace with flexsn_graph, or with make_fx on fake tensors."
            )
        if not self._target.supports(value.dtype):
            raise UnsupportedOpError(
                f"{node.target} returns {value.dtype}, which {self._target.name} does not have{location_text(node)}",
                str(node.target),
            )
        return value.dtype

    def _write_node(self, node: fx.Node) -> str:
        return self._write_literal(node) if node.target in LITERAL_OPS else self.name(node)

    def _write_literal(self, node: fx.Node) -> str:
        if node not in self._literals:
            value: Any = node.args[0]
            dtype = self._get_dtype(node)
            text = self._target.literal(value, dtype) if self._prefix is None else self._add_argument(value, dtype)
            self._literals[node] = self._target.rounded(text, dtype)
        return self._literals[node]

    def _write_result(self, entry: Any, arguments: Sequence[str]) -> str:
        if not isinstance(entry, fx.Node):
            raise GraphError(f"the graph returns {entry!r}, but its results have to be nodes.")
        if entry.target not in LITERAL_OPS:
            # Arguments need no rounding. Results of ops need rounding if the ops themselves have not rounded them.
            computed = self._numerics.precision == "float32" and entry.op != "placeholder"
            return self._target.rounded(self.name(entry), self._get_dtype(entry)) if computed else self.name(entry)
        if not arguments:
            raise GraphError("the graph takes no tensor and returns a constant, whose shape is unknown.")
        return self._target.filled(self._write_literal(entry), arguments[0])
