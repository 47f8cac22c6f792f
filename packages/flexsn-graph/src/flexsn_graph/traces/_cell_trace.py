"""Traces functions that cut dimensions into pieces and join the pieces, as graphs on the elements of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._torch_private import FakeTensorMode, undisturbed
from flexsn_graph.cells import CUTTING_OPS, Axis, CellModule, CellResult, CutModule, Part, in_cells
from flexsn_graph.errors import NonPointwiseError, NothingCutError, TraceError
from flexsn_graph.ir._ports import Role, ports
from flexsn_graph.ir._products import REDUCTIONS
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.lowering._decompositions import TO_PRIMS
from flexsn_graph.lowering._lowering import lower
from flexsn_graph.lowering._normalize import normalize
from flexsn_graph.lowering._strides import broadcast_shapes
from flexsn_graph.reads import Reads
from flexsn_graph.traces._pointwise import _as_tuple, _describe, _NoCaptures
from flexsn_graph.tracing._core import unwrap_compiled
from flexsn_graph.tracing._substitute import Effects, effects_of
from flexsn_graph.tracing._tracer import Tracer, explained


@dataclass(frozen=True, slots=True)
class CellStep:
    """The computation of one kernel.

    Attributes:
        step: the graph of the kernel, from parts of the arguments to parts of the results.
        inputs, outputs: the part that each input or output of the graph represents.
        dtypes: dtypes of the outputs. An output that is summed afterwards may have a wider dtype than the result.
        sizes, where, rows: see `CellModule`.
    """

    step: StepGraph
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    where: tuple[tuple[int, int] | None, ...]
    rows: bool = False

    @property
    def whole(self) -> tuple[bool, ...]:
        """For each output, the result of `is_whole`."""
        return tuple(self.is_whole(part) for part in self.outputs)

    def is_whole(self, part: Part) -> bool:
        """True if a part has elements along the step's last axis, or if the step has no rows."""
        last = len(self.sizes) - 1
        return not self.rows or any(f == Axis(last) for dim in part.dimensions for f in dim)

    def shape(self, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        """Shape of the step for these arguments."""
        return tuple(
            size if place is None else arguments[place[0]].shape[place[1]]
            for size, place in zip(self.sizes, self.where, strict=True)
        )


@dataclass(frozen=True, slots=True)
class CellGraph:
    """The graphs of a function that cuts dimensions.

    Attributes:
        steps: the computation of each kernel. Most functions need a single kernel.
        results: for each result of the function, its origin in the outputs of the kernels.
        dtypes: dtypes of the results.
        differentiable: for each result, True if a gradient can flow through it.
        single: True if the function returns a tensor, not a tuple of tensors.
        free: see `CutModule`.
    """

    steps: tuple[CellStep, ...]
    results: tuple[CellResult, ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    single: bool
    free: tuple[tuple[int | None, ...], ...]


def trace_cells(
    fn: Callable[..., Any],
    arguments: Sequence[Tensor],
    requires_grad: Sequence[bool],
    name: str,
    *,
    gradient: bool = False,
    must_cut: bool = True,
    reads: Reads | None = None,
) -> CellGraph:
    """Traces `fn` for the shapes of `arguments`. `fn` may cut dimensions into pieces of one size and join the pieces.

    Args:
        fn: a function that maps tensors to a tensor or a tuple of tensors.
        arguments: tensors, of which only shape, dtype and device matter.
        requires_grad: for each argument, True if autograd follows it.
        name: name of the function, for messages.
        gradient: True if `cells_gradient_of` created `fn`.
        must_cut: True to refuse a function that neither cuts nor reduces a dimension and whose arguments broadcast to
            one shape. `trace_pointwise` traces such functions. `must_cut` is ignored if `gradient` is True.
        reads: records the values that `fn` reads in this trace in addition to its arguments.

    Raises:
        NothingCutError: see `must_cut`.
        TraceError: `fn` does not return tensors, or captures a tensor.
        UnsupportedOpError: `fn` does something that a kernel cannot do. The message names the op and the line.
    """
    fn, must_cut = unwrap_compiled(fn), must_cut and not gradient
    with undisturbed():
        graph = _trace(fn, arguments, requires_grad, name, gradient, must_cut, reads)
        # A second trace with other sizes of the uncut dimensions shows whether the graph depends on these sizes. If the
        # graph depends on them and reduces rows, a third trace keeps the size of a row and changes only other sizes.
        row = _find_row(graph)
        for fixed in (None, row) if row is not None else (None,):
            free = tuple(tuple(None if f == fixed else f for f in dims) for dims in graph.free)
            mode = FakeTensorMode()
            with mode:
                resized_arguments = [
                    torch.empty(
                        [n if f is None else _SIZES[f % len(_SIZES)] for n, f in zip(t.shape, dims, strict=True)],
                        dtype=t.dtype,
                        device=t.device,
                    )
                    for t, dims in zip(arguments, free, strict=True)
                ]
            try:
                other = _trace(fn, resized_arguments, requires_grad, name, gradient, must_cut, None)
            except Exception:
                continue
            if _describe_graph(graph) == _describe_graph(other):
                return replace(graph, free=free)
    return replace(graph, free=tuple((None,) * t.dim() for t in arguments))


def cells_effects(
    fn: Callable[..., Any],
    arguments: Sequence[Tensor],
    reads: Reads | None = None,
    captured: dict[int, Tensor] | None = None,
) -> Effects:
    """Finds the values that a function captures, changes and returns. For the other arguments, see `trace_cells`.

    Args:
        reads: records the other values that the function reads.
        captured: receives the captured tensors by id, even if the function fails later.

    Raises:
        TorchError: torch raised an error when it ran the function.
    """
    with explained():
        return effects_of(unwrap_compiled(fn), arguments, None, reads, captured)


_SIZES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
# A function cuts or reduces dimensions if its graph contains one of these ops.
_CUTS = (
    CUTTING_OPS
    | REDUCTIONS
    | {
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.split_with_sizes.default,
        torch.ops.aten.unbind.int,
    }
)


def _find_row(graph: CellGraph) -> int | None:
    """The number in `free` that identifies the reduced axis. `None` if no axis of free size is reduced."""
    for step in graph.steps:
        if step.rows and step.where[-1] is not None:
            argument, dim = step.where[-1]
            return graph.free[argument][dim]
    return None


def _describe_graph(graph: CellGraph) -> Any:
    """Describes a graph without the sizes of its free dimensions."""
    steps = [(str(s.step.graph), s.inputs, s.outputs, s.dtypes, s.where) for s in graph.steps]
    fixed = [[n for n, w in zip(s.sizes, s.where, strict=True) if w is None] for s in graph.steps]
    return steps, fixed, graph.results, graph.free, graph.dtypes


def _trace(
    fn: Callable[..., Any],
    arguments: Sequence[Tensor],
    requires_grad: Sequence[bool],
    name: str,
    gradient: bool,
    must_cut: bool,
    reads: Reads | None,
) -> CellGraph:
    single = False

    def as_results(returned: Any) -> tuple[Tensor, ...]:
        nonlocal single
        single = isinstance(returned, Tensor)
        results = _as_tuple(returned)
        if not results or not all(isinstance(r, Tensor) for r in results):
            raise TraceError(f"{name} returned {_describe(returned)}, not a tensor or a tuple of tensors.")
        return results

    captures = partial(_NoCaptures, name)
    tracer = Tracer(fn, arguments, as_results, list(requires_grad), captures=captures, reads=reads)
    table = {op: rule for op, rule in TO_PRIMS.items() if op not in CUTTING_OPS}
    lowered = lower(tracer.record_forward(), tracer.mode, table)
    broadcast = broadcast_shapes([t.shape for t in arguments]) is not None
    if must_cut and broadcast and not any(node.target in _CUTS for node in lowered.graph.nodes):
        raise NothingCutError(f"{name} cuts nothing.")
    cut = _translate(lowered, gradient)
    return CellGraph(
        tuple(_build_step(cells) for cells in cut.steps),
        cut.results,
        tuple(t.dtype for t in tracer.results),
        tracer.differentiable,
        single,
        cut.free,
    )


def _translate(lowered: fx.GraphModule, gradient: bool) -> CutModule:
    if not gradient:
        return in_cells(lowered, sums_allowed=False, rows=True)
    try:
        return in_cells(lowered, sums_allowed=True)
    except NonPointwiseError:
        # Some sums of the graph cannot be computed after the kernel, so the kernel itself reduces rows.
        return in_cells(lowered, sums_allowed=True, rows=True)


def _build_step(cells: CellModule) -> CellStep:
    inputs = ports(Role.INPUT, len(cells.inputs))
    graph = normalize(cells.module, [port.name for port in inputs])
    step = StepGraph(graph, inputs, ports(Role.OUTPUT, len(cells.outputs)), {})
    dtypes = tuple(node.meta["val"].dtype for node in step.entries)
    return CellStep(step, cells.inputs, cells.outputs, dtypes, cells.sizes, cells.where, cells.rows)


def cells_gradient_of(
    fn: Callable[..., Any], num_arguments: int, differentiable: Sequence[bool], wanted: Sequence[bool]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function `(*arguments, *gradients of the differentiable results) -> (*requested gradients)`."""

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        primals, cotangents = values[:num_arguments], values[num_arguments:]
        is_differentiated = any(v.requires_grad for v in values)
        with torch.enable_grad():
            leaves = [
                v.detach().requires_grad_() if is_requested and not v.requires_grad else v
                for v, is_requested in zip(primals, wanted, strict=True)
            ]
            roots = [r for r, flows in zip(_as_tuple(fn(*leaves)), differentiable, strict=True) if flows]
            requested = [leaf for leaf, is_requested in zip(leaves, wanted, strict=True) if is_requested]
            results = torch.autograd.grad(
                roots, requested, cotangents, allow_unused=True, create_graph=is_differentiated
            )
            return tuple(torch.zeros_like(a) if g is None else g for g, a in zip(results, requested, strict=True))

    return gradient
