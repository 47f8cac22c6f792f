"""Scans in a compiler's graph as launches of scan kernels.

`KernelLowering` is a `flexsn_hop.ScanLowering`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

import flexsn_codegen
import flexsn_graph
import flexsn_hop
import flexsn_runtime
from flexsn_graph import CoreReturnError, NonPointwiseError, StepValue, TraceError
from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_hop.callers import warn
from flexsn_runtime._torch_private import size_hint
from flexsn_runtime._torch_private_inductor import is_ahead_of_time
from flexsn_runtime.backend import TargetName, backend_on
from flexsn_runtime.errors import DtypeError, ShapeError, UnsupportedScanError
from flexsn_runtime.graphs._graph_pieces import GraphPieces
from flexsn_runtime.graphs._graph_step import GraphSpecialization, GraphStep
from flexsn_runtime.graphs._staged_op import StagedGraph, unknown_states
from flexsn_runtime.graphs._symbols import Size
from flexsn_runtime.kernels._backward import BackwardScan, split_cotangents
from flexsn_runtime.kernels._forward import ForwardScan
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.plans._buckets import StepCost, checkpoint_distance


class KernelLowering:
    """Makes compiled scans launches of the kernels that eager mode has.

    Args:
        on_cpu: what kernels on the CPU are written in.

    Example:
        >>> from flexsn_runtime import KernelLowering
        >>> KernelLowering().name
        'flexsn_runtime'
    """

    name = "flexsn_runtime"

    def __init__(self, on_cpu: TargetName = "cpp") -> None:
        self._on_cpu = on_cpu

    @property
    def version(self) -> str:
        """Of all code that writes kernels: compiled code is found again on disk by it."""
        return _digest()

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        """Why there are no kernels for these arguments; `None` if there are."""
        devices = {value.device for value in flat_args if isinstance(value, Tensor) and value.dim() > 0}
        if len(devices) != 1:
            return f"the tensors are on {' and '.join(sorted(map(str, devices)))}"
        (device,) = devices
        return backend_on(device, self._on_cpu).why_unavailable(device)

    def checkpoint_interval(self, core: fx.GraphModule, primals: Sequence[Any]) -> int:
        """The distance of the checkpoints, by T, the size of the step and the number of its operators."""
        hints = [size_hint(value.numel()) for value in primals]
        largest = max((hint for hint in hints if hint is not None), default=0)
        num_ops = sum(node.op == "call_function" for node in core.graph.nodes)
        cost = StepCost(num_ops, tuple(value.dtype.itemsize for value in primals), ())
        if _may_have_products(core):
            return _NO_CHECKPOINTS
        backward = backend_on(primals[0].device, self._on_cpu).plan(largest, cost, carried=0).backward
        return checkpoint_distance(backward, primals[0].shape[0], cost.backward_ops)

    def forward(self, core: fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]) -> list[Tensor]:
        """The forward scan; see `flexsn_hop.ScanLowering`.

        Raises:
            UnsupportedScanError: no kernel can be made of the core.
        """
        graph = GraphStep(core, *layout.counts, _values(layout, flat_args))
        with _refusals():
            try:
                return self._forward(graph, layout, flat_args)
            except (NonPointwiseError, CoreReturnError) as error:
                refusal = error
            try:
                return self._staged(StagedGraph(core, layout, self._on_cpu), flat_args)
            except _OTHERWISE as error:
                pieces = _pieces(graph, flat_args, refusal, error)
            of_pieces = pieces.scan(layout)
            step = pieces.step(graph)
            return pieces.join_results(layout, self._forward(step, of_pieces, pieces.split(flat_args, layout)))

    def _forward(self, graph: GraphStep, layout: ScanLayout, flat_args: Sequence[Any]) -> list[Tensor]:
        interval, spare = layout.checkpoint_interval, layout.spare_checkpoints
        step = GraphSpecialization.of(graph, flat_args[0].device, interval or None, self._on_cpu)
        arguments = _arguments(step, flat_args, layout)
        num_steps = arguments.num_steps
        none_kept = isinstance(num_steps, int) and num_steps <= interval
        nearer = bool(interval) and step.distance != interval
        result = ForwardScan(
            step,
            arguments,
            state_seqs=not layout.final_state,
            training=interval > 0 and not (nearer and none_kept),
            spare_rows=_spare(num_steps) if nearer else spare,
        )(arguments)
        if not nearer:
            return [*result.returned, *result.checkpoints]
        rows = (num_steps - 1) // interval + spare
        if none_kept:
            shape = step.trace.step_shape
            kept = [flat_args[0].new_zeros((rows, *shape), dtype=v.dtype) for v in step.trace.states]
            return [*result.returned, *kept]
        assert step.distance is not None
        return [*result.returned, *(_every(t, interval // step.distance, rows) for t in result.checkpoints)]

    def _staged(self, graph: StagedGraph, flat_args: Sequence[Any], rest: Sequence[Tensor] = ()) -> list[Tensor]:
        """A step with products of its values and captured matrices."""
        args = list(flat_args)
        for i in graph.scan.zero_positions:
            args[i] = args[i].new_zeros(args[i].shape)  # its memory was never written
        graph.check(args)
        if "torch._inductor" in sys.modules and is_ahead_of_time():
            warn(
                "a program that is compiled ahead of time calls a step with matrix products through Python: it runs in "
                "processes that have imported flexsn_runtime, and nowhere else",
            )
        return graph([*args, *rest])

    def backward(
        self, core: fx.GraphModule, vjp: fx.GraphModule, layout: BackwardLayout, args: Sequence[Any]
    ) -> list[Tensor]:
        """The backward scan; see `flexsn_hop.ScanLowering`.

        Raises:
            UnsupportedScanError: no kernel can be made of the core's gradient.
        """
        scan = layout.scan
        flat_args, saved, output_grads, state_grads = layout.split(args)
        flows = (*layout.output_grads, *layout.active_states)
        graphs = GraphStep(core, *scan.counts, _values(scan, flat_args), vjp, flows, layout.wanted)
        gradients = [*output_grads, *state_grads]
        with _refusals():
            try:
                return self._backward(graphs, layout, flat_args, saved, gradients)
            except (NonPointwiseError, CoreReturnError) as error:
                refusal = error
            try:
                return self._staged(StagedGraph(core, layout, self._on_cpu, vjp), flat_args, gradients)
            except _OTHERWISE as error:
                pieces = _pieces(graphs, flat_args, refusal, error)
            return pieces.join_gradients(
                layout,
                self._backward(
                    pieces.step(graphs),
                    pieces.backward(layout),
                    pieces.split(flat_args, scan),
                    pieces.split_states(saved),
                    pieces.split_gradients(layout, gradients),
                ),
            )

    def _backward(
        self,
        graphs: GraphStep,
        layout: BackwardLayout,
        flat_args: Sequence[Any],
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        scan = layout.scan
        step = GraphSpecialization.of(graphs, flat_args[0].device, layout.saved_interval, self._on_cpu)
        arguments = _arguments(step, flat_args, scan)
        if step.distance != layout.saved_interval:  # the states are too far apart: the forward runs once more
            again = ForwardScan(
                step, arguments, state_seqs=False, training=True, spare_rows=_spare(arguments.num_steps)
            )
            saved = again(arguments).checkpoints
        given = iter(gradients)
        came = [next(given) if present else None for present in (*layout.output_grads, *layout.state_grads)]
        cotangents = split_cotangents(came, scan.num_outputs, state_seqs=not scan.final_state)
        positions = (*range(graphs.num_primals), *step.lifted)
        wanted = [layout.needs[position] for position in positions]
        found = BackwardScan(step, arguments, saved, cotangents, wanted)(arguments, saved, cotangents)
        results = []
        for position, need in enumerate(layout.needs):
            if need:
                gradient = found[positions.index(position)] if position in positions else None
                # Without a position, the step does not read the tensor that it captures.
                results.append(torch.zeros_like(flat_args[position]) if gradient is None else gradient)
        return results


_OTHERWISE = (UnsupportedScanError, NonPointwiseError, CoreReturnError)


def _pieces(graph: GraphStep, flat_args: Sequence[Any], *refusals: Exception) -> GraphPieces:
    """The pieces of a step that was refused as a whole.

    Raises:
        Exception: the first one of the refusals, where it does not consist of pieces either.
    """
    try:
        return GraphPieces.of(graph, flat_args[0].device)
    except (TraceError, NotImplementedError):
        raise refusals[0] from None


def _spare(num_steps: int) -> int:
    """Rows of checkpoints beyond those that are written: with a symbol for T, their number is never 0 or 1."""
    return 0 if isinstance(num_steps, int) else 2


def _every(rows: Tensor, ratio: int, count: int) -> Tensor:
    """The last of each `ratio` rows, and further ones without meaning up to `count`."""
    last = torch.arange(count, device=rows.device) * ratio + (ratio - 1)
    return rows.index_select(0, last.clamp(max=rows.shape[0] - 1))


# A step with products runs forward once more in the backward, from its first step on.
_NO_CHECKPOINTS = 2**20

_PRODUCTS = frozenset({"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "bilinear"})


def _may_have_products(core: fx.GraphModule) -> bool:
    """Whether a core, of whichever operators, multiplies matrices: by names, for it decides about memory alone."""
    called = (node.target for node in core.graph.nodes if node.op in ("call_function", "call_method"))
    names = (target if isinstance(target, str) else getattr(target, "__name__", "") for target in called)
    return any(name.split(".")[0] in _PRODUCTS for name in names)


def _values(layout: ScanLayout, flat_args: Sequence[Any]) -> list[StepValue | Size]:
    """What one step takes of `[*input_seqs, *init_states, *lifted]`."""
    return [
        StepValue(tuple(value.shape[i < layout.num_inputs :]), value.dtype) if isinstance(value, Tensor) else value
        for i, value in enumerate(flat_args)
    ]


def _arguments(step: GraphSpecialization, flat_args: Sequence[Any], layout: ScanLayout) -> Arguments:
    inputs, states, _ = layout.split(flat_args)
    lifted = tuple(flat_args[position] for position in step.lifted)
    return Arguments(tuple(inputs), tuple(unknown_states(layout, states)), lifted)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Says in one kind of error that kernels cannot be made of a step."""
    try:
        yield
    except UnsupportedScanError:
        raise
    except (TraceError, NotImplementedError, DtypeError, ShapeError) as error:
        raise UnsupportedScanError(str(error)) from error


@functools.cache
def _digest() -> str:
    """Of the sources of the packages that write kernels."""
    digest = hashlib.sha256()
    for package in (flexsn_hop, flexsn_graph, flexsn_codegen, flexsn_runtime):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.h")]):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
