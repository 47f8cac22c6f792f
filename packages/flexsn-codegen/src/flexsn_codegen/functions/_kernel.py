"""A function for one structure of arguments: its traces, its kernels, and the kernels of its gradients."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import hint_of
from flexsn_codegen.core._core import emit_core
from flexsn_codegen.core._rows import emit_rows
from flexsn_codegen.errors import ArgumentError, KernelGoneError, TraceError
from flexsn_codegen.functions._calls import Structure, put_together, results_apart, results_together
from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._follow import follow
from flexsn_codegen.functions._host_numbers import Notes, noting
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.functions._plan import Plan, Source, Trace, TracedStep, remove_duplicates
from flexsn_codegen.functions._words import in_words_of
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_codegen.targets import Target
from flexsn_graph import (
    MAX_DIMENSIONS,
    TRACE_LOCK,
    ArgumentType,
    CellGraph,
    CellStep,
    Effects,
    MutationError,
    NothingCutError,
    PointwiseGraph,
    StepGraph,
    Substituted,
    TorchError,
    cells_gradient_of,
    gradient_of,
    pointwise_effects,
    trace_cells,
    trace_pointwise,
)
from flexsn_graph.callers import warn

# The largest numbers of stored traces: of traces that are only valid for some values of the numbers, and of traces of
# functions that cut dimensions, which are also only valid for some sizes.
_MAX_VARIANTS = 32
_MAX_CUT = 64
PREFIX = "host"

Bound = Callable[..., Any]
"""A function that maps all tensors, with the captured tensors last, to the results and the written arguments."""


class Kernel:
    """A function of tensors and numbers, for one structure of arguments and one kind of tensors.

    A function that cuts dimensions into pieces and joins pieces is traced for the shapes of its arguments. One trace is
    valid for all sizes of the dimensions that the function does not cut. Any other function is traced for tensors of
    one shape, and its trace is valid for all shapes that broadcast.

    Args:
        bind: returns a function of the tensors alone, for the numbers of one trace.
        captured: all values that the function reads in addition to its arguments.
        cuts: True if the function cuts dimensions of its arguments.
        written: positions of the tensors that the function changes.
        result: the structure of the return value.
        gradient: True if the function is the gradient of another function.
        must_cut: see `flexsn_graph.trace_cells`.
        otherwise: the error to raise if the function does not cut anything. By default, the tracer's own error.
        batched: creates the kernel of the function over a batch. By default, `torch.func.vmap` batches the
            function.
        like: for a gradient, the index of the tensor to which each result belongs.
        cotangents: for a gradient, the index of the first tensor that is a cotangent, not an argument of the
            differentiated function.

    Attributes:
        key: the name of the kernel in graphs.
        single: True if the function returned a tensor, not a tuple of tensors, when it was last traced.
    """

    def __init__(
        self,
        name: str,
        numerics: Numerics,
        bind: Callable[[Notes], Bound],
        *,
        captured: Captured,
        cuts: bool = False,
        written: tuple[int, ...] = (),
        result: Structure = ("other", ""),
        gradient: bool = False,
        must_cut: bool = True,
        otherwise: Exception | None = None,
        batched: Callable[[], Kernel] | None = None,
        like: tuple[int, ...] = (),
        cotangents: int = 0,
    ) -> None:
        self.name, self.numerics, self.captured, self.cuts = name, numerics, captured, cuts
        self.written, self.result = written, result
        self.must_cut, self.single = must_cut, True
        self.key = register_kernel(name, self)
        self._bind = bind
        self._gradient = gradient
        self._like, self._cotangents = like, cotangents
        self._otherwise = otherwise
        self._variants: dict[tuple[Any, ...], list[Trace]] = {}
        self._gradients: dict[tuple[Any, ...], Kernel] = {}
        self._batched: Kernel | None = None
        self._batched_by = batched or self._make_batched

    @staticmethod
    def of(
        fn: Callable[..., Any],
        name: str,
        numerics: Numerics,
        structure: Structure,
        examples: Sequence[Tensor],
        numbers: Sequence[Any],
    ) -> Kernel:
        """Makes the kernel of a user's function that does not cut anything.

        Args:
            examples: the tensors of a call, of which only the number of dimensions, dtype and device are used.
            numbers: the numbers of a call.
        """

        def call(tensors: Sequence[Tensor], notes: Notes) -> Any:
            args, kwargs = put_together(structure, tensors, notes.arguments())
            with noting() if notes.numbers else ExitStack():
                return fn(*args, **kwargs)

        def unbound(*tensors: Tensor) -> Any:
            return call(tensors, Notes(numbers))

        types, dimensions = _list_types(examples), _count_dimensions(examples)
        device = examples[0].device if examples else torch.device("cpu")
        captured = Captured(fn, name)
        captured_so_far: dict[int, Tensor] = {}
        try:
            with in_words_of(name), captured.reads.restored():
                effects = pointwise_effects(unbound, types, dimensions, device, name, captured.reads, captured_so_far)
                with captured.reads.preserved():
                    pointwise_effects(unbound, types, dimensions, device, name)
                captured.keep(effects.captured)
        except TorchError:
            if not captured_so_far:
                # A trace may raise a more precise error. Errors for writes are ignored, because the function may write.
                with contextlib.suppress(MutationError), in_words_of(name), captured.reads.preserved():
                    trace_pointwise(unbound, types, dimensions, device, name)
            raise
        results: list[Tensor] = []
        result = results_apart(effects.returned, _make_argument_finder(effects.written, effects.arguments), results)
        _check_result(name, result, effects)
        count = len(examples)

        def bind(notes: Notes) -> Bound:
            def function(*tensors: Tensor) -> tuple[Tensor, ...]:
                passed = list(tensors[:count])
                for i in effects.written:
                    passed[i] = passed[i].clone()
                stand_ins = dict(zip(map(id, captured.tensors), tensors[count:], strict=True))
                with captured.reads.preserved(), Substituted(stand_ins) if stand_ins else ExitStack():
                    returned = call(passed, notes)
                matches: list[Tensor] = []
                if results_apart(returned, _make_argument_finder(effects.written, passed), matches) != result:
                    raise TraceError(
                        f"{name} returns another structure for other numbers or other gradients: return the same "
                        "number of tensors, nested in the same way, in each call."
                    )
                return (*matches, *(passed[i] for i in effects.written))

            return function

        return Kernel(name, numerics, bind, captured=captured, written=effects.written, result=result)

    # -- traces --------------------------------------------------------------------------------------------

    def variant(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        requested: Sequence[bool],
        target: Target,
        scalars: Sequence[bool] | None = None,
        *,
        summed: bool = False,
    ) -> Trace:
        """The trace that is valid for tensors and numbers like these.

        Args:
            tensors: all tensors, with the captured tensors last. Their sizes may be symbols.
            requested: for each tensor, True if autograd follows computations on it.
            scalars: for each tensor, True if it promotes as a tensor without dimensions. By default, True if it has no
                dimensions.
            summed: True if the results of a gradient have the shapes of the arguments.

        Raises:
            UnsupportedOpError, TraceError: no kernel can compute the function.
            ArgumentError: a tensor has more than `MAX_DIMENSIONS` dimensions.
        """
        dimensions = _count_dimensions(tensors)
        if dimensions > MAX_DIMENSIONS and not self.cuts:
            raise ArgumentError(f"{self.name} takes tensors of at most {MAX_DIMENSIONS} dimensions.")
        flags = [t.dim() == 0 for t in tensors] if scalars is None or self.cuts else scalars
        types = tuple(
            ArgumentType(t.dtype, scalar and dimensions > 0, is_requested)
            for t, scalar, is_requested in zip(tensors, flags, requested, strict=True)
        )
        dimensions_key = tuple(t.dim() for t in tensors) if self.cuts else dimensions
        variants = self._variants.setdefault((target.name, dimensions_key, tensors[0].device.type, types, summed), [])
        result = _find_valid(variants, tensors, numbers)
        if result is None:
            with TRACE_LOCK:
                # Another thread may have made the trace in the meantime.
                result = _find_valid(variants, tensors, numbers)
                if result is None:
                    result = self._add_variant(variants, types, tensors, list(numbers), target, summed)
        self.single = result.graph.single
        return result

    def _add_variant(
        self,
        variants: list[Trace],
        types: Sequence[ArgumentType],
        tensors: Sequence[Tensor],
        numbers: list[Any],
        target: Target,
        summed: bool,
    ) -> Trace:
        if self.cuts:
            del variants[_MAX_CUT - 1 :]
        elif len(variants) >= _MAX_VARIANTS:
            warn(
                f"{self.name} has been compiled {_MAX_VARIANTS} times for other numbers: it branches on their values, "
                "or passes them to functions that cannot be followed (int(x), float(x), range(x)). Compute changing "
                "values with Python's operators and the functions of `math`, or pass them as tensors without "
                "dimensions.",
                otherwise=self.captured.where,
            )
            variants.clear()
        trace = self._make_trace(types, tensors, numbers, target, summed)
        variants.insert(0, trace)
        return trace

    def _make_trace(
        self,
        types: Sequence[ArgumentType],
        tensors: Sequence[Tensor],
        numbers: list[Any],
        target: Target,
        summed: bool,
    ) -> Trace:
        shapes = tuple(tuple(_convert_size(size) for size in t.shape) for t in tensors) if self.cuts else None

        result_sources: tuple[Source, ...] | None = None

        def trace(notes: Notes) -> tuple[PointwiseGraph | CellGraph, list[CoreSource], object]:
            nonlocal result_sources
            graph, steps, structure = self._trace_graph(self._bind(notes), types, tensors, shapes)
            if summed and isinstance(graph, PointwiseGraph):
                graph, result_sources = remove_duplicates(graph, self._cotangents)
                steps, structure = [graph.step] if graph.dtypes else [], (structure, result_sources)
            numbers = PREFIX if notes.numbers else None
            cells = graph.steps if isinstance(graph, CellGraph) else (None,) * len(steps)
            sources = [self._emit(*pair, target, numbers) for pair in zip(steps, cells, strict=True)]
            return graph, sources, structure

        try:
            # A trace is only valid for the current integers, because an integer may determine how dimensions are cut:
            # two integers may cut the sizes of this trace in the same way, but other sizes differently.
            fixed = [i for i, number in enumerate(numbers) if self.cuts and not isinstance(number, float)]
            with in_words_of(self.name), self.captured.traced():
                graph, sources, conditions, slots = follow(trace, numbers, fixed)
        except NothingCutError:
            if self._otherwise is None:
                raise
            raise self._otherwise from None
        cells = graph.steps if isinstance(graph, CellGraph) else (None,) * len(sources)
        steps = [TracedStep(*step) for step in zip(sources, slots, cells, strict=True)]
        return Trace(self.name, graph, steps, conditions, self.numerics.fast_math, self.written, shapes, result_sources)

    def _emit(self, step: StepGraph, cells: CellStep | None, target: Target, numbers: str | None) -> CoreSource:
        if cells is not None and cells.rows:
            return emit_rows(step, self.name, cells.whole, numerics=self.numerics, target=target, numbers=numbers)
        return emit_core(
            step,
            self.name,
            prune=True,
            precision=self.numerics.precision,
            fast_math=self.numerics.fast_math,
            target=target,
            numbers=numbers,
        )

    def _trace_graph(
        self,
        bound: Bound,
        types: Sequence[ArgumentType],
        tensors: Sequence[Tensor],
        shapes: tuple[tuple[int, ...], ...] | None,
    ) -> tuple[PointwiseGraph | CellGraph, list[StepGraph], object]:
        """The graph, the graph of each step, and the properties that have to be equal for other numbers."""
        gradient, reads = self._gradient, self.captured.reads
        if shapes is None:
            dimensions, device = _count_dimensions(tensors), tensors[0].device
            pointwise_graph = trace_pointwise(
                bound, types, dimensions, device, self.name, gradient=gradient, reads=reads
            )
            return pointwise_graph, [pointwise_graph.step], None
        if any(type(size) is not int for t in tensors for size in t.shape):
            pairs = zip(shapes, tensors, strict=True)
            tensors = [torch.empty(shape, dtype=t.dtype, device=t.device) for shape, t in pairs]
        requested = [argument.requires_grad for argument in types]
        graph = trace_cells(
            bound, tensors, requested, self.name, gradient=gradient, must_cut=self.must_cut, reads=reads
        )
        steps = [(s.inputs, s.outputs, s.dtypes, s.sizes, s.where) for s in graph.steps]
        structure = (steps, graph.results, graph.dtypes, graph.differentiable, graph.single, graph.free)
        return graph, [step.step for step in graph.steps], structure

    def merged(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
        """All tensors of the kernel, merged from the tensors that it only reads and those that it writes, in order."""
        next_read, next_written = iter(read), iter(written)
        return [next(next_written if i in self.written else next_read) for i in range(len(read) + len(written))]

    # -- calls ---------------------------------------------------------------------------------------------

    def run(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        requested: Sequence[bool],
        outs: Sequence[Tensor] = (),
        scalars: Sequence[bool] | None = None,
        *,
        summed: bool = False,
    ) -> tuple[list[Tensor], Trace]:
        """Launches the kernel. Returns the results without the written arguments, and the trace of the kernel.

        Args:
            summed: True if the results of a gradient have the shapes of the arguments. Results may then be arguments
                themselves.
        """
        target = target_on(tensors[0].device, self.name)
        trace = self.variant(tensors, numbers, requested, target, scalars, summed=summed)
        detached = [t.detach().resolve_neg() for t in tensors]
        for i in self.written:
            detached[i] = tensors[i].detach()
        if trace.sources is not None:
            for number in {number for is_argument, number in trace.sources if is_argument}:
                # Passes the tensor itself, because autograd counts the references to a gradient to decide whether the
                # gradient may be changed in place.
                detached[number] = tensors[number].resolve_neg()
            return self.plan(trace, detached).run(detached, trace.words(numbers)), trace
        if not self.cuts:
            return self.plan(trace, detached, outs).run(detached, trace.words(numbers), outs), trace
        results = self.plan(trace, detached).run(detached, trace.words(numbers))
        for out, result in zip(outs, results, strict=bool(outs)):
            if out.shape != result.shape:
                raise TraceError(
                    f"{self.name} returns {list(result.shape)} for {list(numbers)}, but {list(out.shape)} for the "
                    "numbers for which the graph was compiled. A value that determines shapes has to be a constant of "
                    "the graph."
                )
            out.copy_(result)
        return list(outs) or results, trace

    def plan(self, trace: Trace, tensors: Sequence[Tensor], outs: Sequence[Tensor] = ()) -> Plan:
        """The plan of a call on tensors like these, for one of the kernel's traces."""
        return trace.plan(tensors, outs, self._like if trace.sources is not None else ())

    def returned(self, results: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """The return value of the function, rebuilt from the kernel's results and the call's tensors."""
        if self.cuts:
            return results[0] if self.single else tuple(results)
        return results_together(self.result, results, tensors)

    def sources(self, tensors: Sequence[Tensor], numbers: Sequence[Any], target: Target) -> list[KernelSource]:
        """The sources of the kernels for arguments like these, usually one source. Meta tensors are accepted."""
        trace = self.variant(tensors, numbers, [False] * len(tensors), target)
        return [launch.built.source for launch in trace.plan(tensors).launches]

    def empty_results(
        self, tensors: Sequence[Tensor], numbers: Sequence[Any], target: Target, scalars: Sequence[bool] | None
    ) -> list[Tensor]:
        """Allocates memory for the results, except for written arguments."""
        trace = self.variant(tensors, numbers, [False] * len(tensors), target, scalars)
        return trace.plan(tensors).results(tensors[0])

    # -- gradients and batches -----------------------------------------------------------------------------

    def gradient(self, requested: Sequence[bool], differentiable: Sequence[bool]) -> Kernel:
        """The kernel `(*tensors, *gradients of the differentiable results) -> (*requested gradients)`.

        If nothing is cut, each gradient has the shape to which all arguments broadcast. The gradient of an argument
        without dimensions may have a wider dtype, in which it is then summed.
        """
        key = (tuple(requested), tuple(differentiable))
        kernel = self._gradients.get(key)
        if kernel is None:
            gradient_by = cells_gradient_of if self.cuts else gradient_of

            def bind(notes: Notes) -> Bound:
                return gradient_by(self._bind(notes), len(requested), differentiable, requested)

            kernel = self._gradients[key] = Kernel(
                f"{self.name}_backward",
                self.numerics,
                bind,
                captured=self.captured,
                cuts=self.cuts,
                gradient=True,
                like=tuple(i for i, is_requested in enumerate(requested) if is_requested),
                cotangents=len(requested),
                batched=lambda: self.batched().gradient(requested, differentiable),
            )
        return kernel

    def batched(self) -> Kernel:
        """The kernel of a function that cuts dimensions, over a batch: dimension 0 of all arguments and results."""
        if self._batched is None:
            self._batched = self._batched_by()
        return self._batched

    def _make_batched(self) -> Kernel:
        def bind(notes: Notes) -> Bound:
            return torch.func.vmap(self._bind(notes))

        name = f"{self.name}_batched"
        return Kernel(name, self.numerics, bind, captured=self.captured, cuts=True, must_cut=False)


def _find_valid(traces: Sequence[Trace], tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Trace | None:
    for trace in traces:
        if trace.fits(numbers) and trace.serves(tensors):
            return trace
    return None


def _convert_size(size: int | torch.SymInt) -> int:
    """A size as a plain integer. A symbol is replaced by its value in the call that is compiled."""
    return int(hint_of(size)) if isinstance(size, torch.SymInt) else size


_kernels: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register_kernel(name: str, kernel: object) -> str:
    """Registers a kernel. Returns a key by which graphs find the kernel as long as it exists."""
    key = f"{name}-{uuid.uuid4().hex}"
    _kernels[key] = kernel
    return key


def kernel_of(key: str) -> Any:
    """The kernel to which a graph refers: a `Kernel`, or a `ListsCall`.

    Raises:
        KernelGoneError: this process does not have the kernel, or has deleted it.
    """
    kernel = _kernels.get(key)
    if kernel is None:
        raise KernelGoneError(
            f"a graph launches the kernel of {key.rpartition('-')[0]!r}, which does not exist: the function that "
            "`pointwise` returned was deleted, or the graph was made by another process. Keep the function as long as "
            "the graph; before saving an exported program, call its run_decompositions()."
        )
    return kernel


def _list_types(tensors: Sequence[Tensor]) -> list[ArgumentType]:
    dimensions = _count_dimensions(tensors)
    return [ArgumentType(t.dtype, t.dim() == 0 and dimensions > 0) for t in tensors]


def _count_dimensions(tensors: Sequence[Tensor]) -> int:
    return max((t.dim() for t in tensors), default=0)


def _make_argument_finder(written: Sequence[int], passed: Sequence[Tensor]) -> Callable[[Tensor], int | None]:
    places = {id(passed[i]): i for i in written}
    return lambda tensor: places.get(id(tensor))


def _check_result(name: str, result: Structure, effects: Effects) -> None:
    kinds = _flatten(result)
    unsupported = next((part[1] for part in kinds if part[0] == "other"), None)
    if unsupported is not None:
        raise TraceError(
            f"{name} returned {unsupported!r}: a kernel's results are tensors, or tuples, lists and dicts of tensors."
        )
    if not effects.written and not any(part[0] == "tensor" for part in kinds):
        raise TraceError(f"{name} returned no tensor and changed none: there is nothing to compute.")


def _flatten(result: Structure) -> list[Structure]:
    if result[0] in ("tuple", "list", "named"):
        return [kind for part in result[1] for kind in _flatten(part)]
    if result[0] == "dict":
        return [kind for _, part in result[1] for kind in _flatten(part)]
    return [result]
