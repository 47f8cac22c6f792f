"""Lowers scans in a compiler's graph to launches of scan kernels.

`KernelLowering` is a `flexsn_hop.ScanLowering`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

import flexsn_codegen
import flexsn_graph
import flexsn_hop
import flexsn_runtime
from flexsn_graph import CoreReturnError, NonPointwiseError, TraceError
from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_hop.callers import warn
from flexsn_runtime._torch_private import size_hint
from flexsn_runtime._torch_private_inductor import is_ahead_of_time, records_cuda_graphs
from flexsn_runtime.backend import TargetName, backend_on
from flexsn_runtime.errors import DtypeError, ShapeError, UnsupportedScanError
from flexsn_runtime.graphs._graph_pieces import GraphPieces
from flexsn_runtime.graphs._graph_scan import scan_backward, scan_forward, values_of
from flexsn_runtime.graphs._graph_step import GraphSpecialization, GraphStep
from flexsn_runtime.graphs._scan_op import ScanGraph
from flexsn_runtime.plans._buckets import StepCost, checkpoint_distance
from flexsn_runtime.segments._choice import may_run_in_segments


class KernelLowering:
    """Lowers scans in compiled graphs to launches of the kernels that eager mode launches.

    Args:
        on_cpu: the language of kernels on the CPU.

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
        """Digest of all code that generates kernels. The digest is part of the key of compiled code on disk."""
        return _compute_digest()

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        """Returns the reason why no kernels exist for these arguments; `None` if kernels exist."""
        devices = {value.device for value in flat_args if isinstance(value, Tensor) and value.dim() > 0}
        if len(devices) != 1:
            return f"the tensors are on {' and '.join(sorted(map(str, devices)))}"
        (device,) = devices
        return backend_on(device, self._on_cpu).why_unavailable(device)

    def checkpoint_interval(self, core: fx.GraphModule, primals: Sequence[Any]) -> int:
        """Returns the distance between checkpoints, which depends on T, and on a step's size and number of operators.

        For a step that may have products, the distance is so large that no checkpoints are stored.
        """
        hints = [size_hint(value.numel()) for value in primals]
        largest = max((hint for hint in hints if hint is not None), default=0)
        num_ops = sum(node.op == "call_function" for node in core.graph.nodes)
        cost = StepCost(num_ops, tuple(value.dtype.itemsize for value in primals), ())
        if _may_have_products(core):
            return _NO_CHECKPOINTS
        backward = backend_on(primals[0].device, self._on_cpu).plan(largest, cost, carried=0).backward
        return checkpoint_distance(backward, primals[0].shape[0], cost.backward_ops)

    def forward(self, core: fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]) -> list[Tensor]:
        """Returns the results of the forward scan; see `flexsn_hop.ScanLowering`.

        Raises:
            UnsupportedScanError: no kernel can be generated for the core.
        """
        graph = GraphStep(core, *layout.counts, values_of(layout, flat_args))
        with _convert_refusals():
            try:
                return self._forward(graph, layout, flat_args)
            except (NonPointwiseError, CoreReturnError) as error:
                refusal = error
            try:
                return self._lower_with_products(ScanGraph(core, layout, self._on_cpu, has_products=True), flat_args)
            except _REFUSAL_ERRORS as error:
                pieces = _cut_into_pieces(graph, flat_args, refusal, error)
            pieces_layout = pieces.scan(layout)
            step = self._specialize_on_pieces(pieces, graph, flat_args, layout.checkpoint_interval or None)
            return pieces.join_results(layout, scan_forward(step, pieces_layout, pieces.split(flat_args, layout)))

    def _forward(self, graph: GraphStep, layout: ScanLayout, flat_args: Sequence[Any]) -> list[Tensor]:
        step = GraphSpecialization.of(graph, flat_args[0].device, layout.checkpoint_interval or None, self._on_cpu)
        if _run_in_segments(step, layout, flat_args):
            assert isinstance(graph.core, fx.GraphModule)
            return self._lower_to_operator(step, ScanGraph(graph.core, layout, self._on_cpu), flat_args)
        return scan_forward(step, layout, flat_args, ahead=_is_ahead_of_time())

    def _lower_with_products(
        self, graph: ScanGraph, flat_args: Sequence[Any], rest: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Lowers a step with products of its values and captured matrices."""
        args = _fill_absent_states(graph.scan, flat_args)
        graph.check(args)
        if _is_ahead_of_time():
            warn(
                "a program that is compiled ahead of time calls a step with matrix products through Python, so it runs "
                "only in processes that have imported flexsn_runtime. With FLEXSN_HOP_LOWERING=scan in the "
                "environment and torch 2.15, torch.export.export records torch's own scan instead, and the program "
                "needs no Python",
            )
        return graph([*args, *rest])

    @staticmethod
    def _lower_to_operator(
        step: GraphSpecialization, graph: ScanGraph, flat_args: Sequence[Any], rest: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Lowers a scan to an operator. When the operator runs, it chooses its launches as in eager mode."""
        step.check(training=graph.vjp is not None)
        return graph([*_fill_absent_states(graph.scan, flat_args), *rest])

    def backward(
        self, core: fx.GraphModule, vjp: fx.GraphModule, layout: BackwardLayout, args: Sequence[Any]
    ) -> list[Tensor]:
        """Returns the gradients of the backward scan; see `flexsn_hop.ScanLowering`.

        Raises:
            UnsupportedScanError: no kernel can compute the core's gradient.
        """
        scan = layout.scan
        flat_args, saved, output_grads, state_grads = layout.split(args)
        flows = (*layout.output_grads, *layout.active_states)
        graphs = GraphStep(core, *scan.counts, values_of(scan, flat_args), vjp, flows, layout.wanted)
        gradients = [*output_grads, *state_grads]
        with _convert_refusals():
            try:
                return self._backward(graphs, layout, flat_args, saved, gradients)
            except (NonPointwiseError, CoreReturnError) as error:
                refusal = error
            try:
                scan_graph = ScanGraph(core, layout, self._on_cpu, vjp, has_products=True)
                return self._lower_with_products(scan_graph, flat_args, gradients)
            except _REFUSAL_ERRORS as error:
                pieces = _cut_into_pieces(graphs, flat_args, refusal, error)
            piece_gradients = scan_backward(
                self._specialize_on_pieces(pieces, graphs, flat_args, layout.saved_interval),
                pieces.backward(layout),
                pieces.split(flat_args, scan),
                pieces.split_states(saved),
                pieces.split_gradients(layout, gradients),
            )
            return pieces.join_gradients(layout, piece_gradients)

    def _specialize_on_pieces(
        self, pieces: GraphPieces, graph: GraphStep, flat_args: Sequence[Any], segment: int | None
    ) -> GraphSpecialization:
        return GraphSpecialization.of(pieces.step(graph), flat_args[0].device, segment, self._on_cpu)

    def _backward(
        self,
        graphs: GraphStep,
        layout: BackwardLayout,
        flat_args: Sequence[Any],
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        step = GraphSpecialization.of(graphs, flat_args[0].device, layout.saved_interval, self._on_cpu)
        if _run_in_segments(step, layout.scan, flat_args):
            assert isinstance(graphs.core, fx.GraphModule)
            assert isinstance(graphs.vjp, fx.GraphModule)
            graph = ScanGraph(graphs.core, layout, self._on_cpu, graphs.vjp)
            return self._lower_to_operator(step, graph, flat_args, [*saved, *gradients])
        return scan_backward(step, layout, flat_args, saved, gradients)


_REFUSAL_ERRORS = (UnsupportedScanError, NonPointwiseError, CoreReturnError)


def _cut_into_pieces(
    graph: GraphStep, flat_args: Sequence[Any], elementwise: Exception, with_products: Exception
) -> GraphPieces:
    """Returns the pieces of a step that can be lowered neither as an elementwise step nor as a step with products.

    Args:
        elementwise, with_products: the errors of these two lowerings.

    Raises:
        Exception: the step cannot be divided into pieces. The error is `with_products` if `with_products` names an
            operation, because a step with products may contain more operations. Otherwise, the error is `elementwise`.
    """
    try:
        return GraphPieces.of(graph, flat_args[0].device)
    except (TraceError, NotImplementedError):
        raise (with_products if isinstance(with_products, NonPointwiseError) else elementwise) from None


def _run_in_segments(step: GraphSpecialization, layout: ScanLayout, flat_args: Sequence[Any]) -> bool:
    """True if parallel segments save more time than a call into Python takes.

    Sizes may be symbols with hints. For a program that is compiled ahead of time, the result is False, because the
    program must run without Python.
    """
    num_steps, ncl = flat_args[0].shape[0], math.prod(step.trace.step_shape)
    hints = size_hint(num_steps), size_hint(ncl)
    return may_run_in_segments(step, *hints, recorded=_records_cuda_graphs()) and not _is_ahead_of_time()


def _is_ahead_of_time() -> bool:
    return "torch._inductor" in sys.modules and is_ahead_of_time()


def _records_cuda_graphs() -> bool:
    return "torch._inductor" in sys.modules and records_cuda_graphs()


def _fill_absent_states(layout: ScanLayout, flat_args: Sequence[Any]) -> list[Any]:
    """Returns the arguments, in which tensors of zeros replace the states that are known to be zeros.

    The memory of such a state may never have been written.
    """
    args = list(flat_args)
    for i in layout.zero_positions:
        args[i] = args[i].new_zeros(args[i].shape)
    return args


# The backward of a step with products runs the whole forward again, so it needs no checkpoints.
_NO_CHECKPOINTS = 2**20

_MATRIX_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "bilinear"}
_CONVOLUTIONS = {"convolution", *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))}
_PRODUCTS = frozenset(_MATRIX_PRODUCTS | _CONVOLUTIONS)


def _may_have_products(core: fx.GraphModule) -> bool:
    """True if a core contains an operator whose name is the name of a matrix product or a convolution.

    The names are sufficient, because a wrong result only affects the amount of memory.
    """
    targets = (node.target for node in core.graph.nodes if node.op in ("call_function", "call_method"))
    names = (target if isinstance(target, str) else getattr(target, "__name__", "") for target in targets)
    return any(name.split(".")[0] in _PRODUCTS for name in names)


@contextlib.contextmanager
def _convert_refusals() -> Iterator[None]:
    """Returns a context that converts errors about steps without kernels to `UnsupportedScanError`."""
    try:
        yield
    except UnsupportedScanError:
        raise
    except (TraceError, NotImplementedError, DtypeError, ShapeError) as error:
        raise UnsupportedScanError(str(error)) from error


@functools.cache
def _compute_digest() -> str:
    """Returns a digest of the sources of the packages that generate kernels."""
    digest = hashlib.sha256()
    for package in (flexsn_hop, flexsn_graph, flexsn_codegen, flexsn_runtime):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.h")]):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
