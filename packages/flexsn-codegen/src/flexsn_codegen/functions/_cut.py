"""Functions that cut a dimension into pieces and join them: halves of a gate, rotary embeddings, channels, cells.

Such a function becomes a kernel on the elements of one piece, for which each piece of an argument or a result is an
operand with strides of its own. Nothing is copied, and nothing is read twice: see `flexsn_graph.cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import hint_of
from flexsn_codegen.errors import TraceError
from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._follow import Conditions, follow, hold, integers
from flexsn_codegen.functions._host_numbers import Expression, Notes
from flexsn_codegen.functions._kernel import PREFIX, named
from flexsn_codegen.functions._launch import launch, target_on
from flexsn_codegen.functions._layout import Plan, plan_layout
from flexsn_codegen.source._core import emit_core
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import CoreSource, KernelSource, StepLayout
from flexsn_codegen.targets import Target
from flexsn_graph import TRACE_LOCK, CellGraph, CellStep, NothingCutError, Role, cells_gradient_of, trace_cells

_MAX_PLANS = 1024
_MAX_TRACES = 64
Function = Callable[..., Any]
_Shapes = tuple[tuple[int, ...], ...]


class CutFunction:
    """A function that cuts. One trace serves all sizes of the dimensions that it does not cut, and all
    floats; whole numbers, which may say where it cuts, are part of it.

    Args:
        bind: for one trace's numbers, the function from tensors to a tensor or a tuple of tensors.
        name: of its kernels.
        numerics: how they compute.
        captured: what the user's function reads besides its arguments; its tensors come last among the arguments.
        gradient: whether it is made by `cells_gradient_of`.
        otherwise: raised where it turns out to cut nothing; by default the tracer's own error.

    Attributes:
        key: names it in graphs.
        written: nothing, as it is now.
        single: whether it returned a tensor when it was traced last, not a tuple of tensors.
        must_cut: as for `flexsn_graph.trace_cells`.
    """

    written: tuple[int, ...] = ()

    def __init__(
        self,
        bind: Callable[[Notes], Function],
        name: str,
        numerics: Numerics,
        captured: Captured,
        *,
        gradient: bool = False,
        otherwise: Exception | None = None,
    ) -> None:
        self.name, self.key = name, named(name, self)
        self.single = True
        self.captured = captured
        self._gradient = gradient
        self.must_cut = True
        self._bind = bind
        self._numerics = numerics
        self._otherwise = otherwise
        self._traces: dict[tuple[Any, ...], list[_Trace]] = {}
        self._of_shapes: dict[tuple[Any, ...], _Trace] = {}
        self._gradients: dict[tuple[Any, ...], CutFunction] = {}
        self._batched: CutFunction | None = None
        self._batched_by = self._over_a_batch

    def run(
        self,
        inputs: Sequence[Tensor],
        numbers: Sequence[Any],
        requires_grad: Sequence[bool],
        outs: Sequence[Tensor] = (),
        scalars: Sequence[bool] | None = None,
    ) -> tuple[list[Tensor], _Trace]:
        """The results, without autograd; written to `outs`, if there are any."""
        trace = self.trace(inputs, numbers, tuple(requires_grad))
        results = trace.run([t.detach().resolve_neg() for t in inputs], numbers)
        for out, result in zip(outs, results, strict=bool(outs)):
            if out.shape != result.shape:
                raise TraceError(
                    f"{self.name} returns {list(result.shape)} for {list(numbers)}, and {list(out.shape)} for the "
                    "numbers that the graph was compiled for. What decides shapes has to be a constant of the graph."
                )
            out.copy_(result)
        return list(outs) or results, trace

    def sources(self, *inputs: Tensor, target: Target) -> list[KernelSource]:
        """The kernels for such arguments, mostly one. Meta tensors will do."""
        trace = self.trace(inputs, (), (False,) * len(inputs), target)
        return [kernel.planned(inputs, trace.graph).source for kernel in trace.kernels]

    def variant(
        self,
        inputs: Sequence[Tensor],
        numbers: Sequence[Any],
        requires_grad: Sequence[bool],
        target: Target,
        scalars: Sequence[bool] | None = None,
    ) -> _Trace:
        """The trace for such arguments, whose sizes may be symbols."""
        return self.trace(inputs, numbers, tuple(requires_grad), target)

    def empty_results(
        self, inputs: Sequence[Tensor], numbers: Sequence[Any], target: Target, scalars: Sequence[bool] | None
    ) -> list[Tensor]:
        """Memory for the results."""
        graph = self.trace(inputs, numbers, (False,) * len(inputs), target).graph
        found = []
        for result, dtype in zip(graph.results, graph.dtypes, strict=True):
            shape = graph.steps[result.step].shape(inputs) if result.step >= 0 else ()
            found.append(inputs[0].new_empty(result.shape(shape), dtype=dtype))
        return found

    def trace(
        self,
        inputs: Sequence[Tensor],
        numbers: Sequence[Any],
        requires_grad: tuple[bool, ...],
        target: Target | None = None,
        *,
        must_cut: bool = True,
    ) -> _Trace:
        """The graph and the kernels for such arguments.

        Args:
            must_cut: as for `flexsn_graph.trace_cells`; once it was false, it stays so.

        Raises:
            UnsupportedOpError, TraceError: see `flexsn_graph.trace_cells`.
        """
        self.must_cut &= must_cut
        target = target or target_on(inputs[0].device, self.name)
        kinds = tuple((t.dtype, t.dim()) for t in inputs)
        key = (target.name, inputs[0].device.type, requires_grad, kinds)
        shapes = tuple(tuple(t.shape) for t in inputs)
        has_symbols = any(type(size) is not int for shape in shapes for size in shape)
        found = None if has_symbols else self._of_shapes.get((shapes, key))
        if found is None or not found.holds(numbers):
            known = self._traces.setdefault(key, [])
            found = _serving(known, shapes, numbers)
            if found is None:
                with TRACE_LOCK:
                    # Another thread may have made it meanwhile.
                    found = _serving(known, shapes, numbers)
                    if found is None:
                        found = self._traced(inputs, numbers, requires_grad, target)
                        known.insert(0, found)
                        del known[_MAX_TRACES:]
            if len(self._of_shapes) >= _MAX_PLANS:
                self._of_shapes.clear()
            if not has_symbols:
                self._of_shapes[shapes, key] = found
        self.single = found.graph.single
        return found

    def _traced(
        self, inputs: Sequence[Tensor], numbers: Sequence[Any], requires_grad: tuple[bool, ...], target: Target
    ) -> _Trace:
        shapes = tuple(tuple(_size(size) for size in t.shape) for t in inputs)
        if any(type(size) is not int for t in inputs for size in t.shape):
            pairs = zip(shapes, inputs, strict=True)
            inputs = [torch.empty(shape, dtype=t.dtype, device=t.device) for shape, t in pairs]
        precision, fast_math = self._numerics.precision, self._numerics.fast_math

        def trace(notes: Notes) -> tuple[CellGraph, list[CoreSource], object]:
            graph = trace_cells(
                self._bind(notes),
                inputs,
                requires_grad,
                self.name,
                gradient=self._gradient,
                must_cut=self.must_cut,
                reads=self.captured.reads,
            )
            cores = [
                emit_core(
                    step.step,
                    self.name,
                    prune=True,
                    precision=precision,
                    fast_math=fast_math,
                    target=target,
                    numbers=PREFIX if notes.numbers else None,
                )
                for step in graph.steps
            ]
            steps = [(s.inputs, s.outputs, s.dtypes, s.sizes, s.where) for s in graph.steps]
            return graph, cores, (steps, graph.results, graph.dtypes, graph.differentiable, graph.single, graph.free)

        try:
            # A whole number may decide what is cut, and two of them may cut these sizes alike, and not others.
            whole = [i for i, number in enumerate(numbers) if not isinstance(number, float)]
            with self.captured.traced():
                graph, cores, conditions, slots = follow(trace, list(numbers), whole)
        except NothingCutError:
            if self._otherwise is None:
                raise
            raise self._otherwise from None
        steps = zip(graph.steps, cores, slots, strict=True)
        kernels = [_Kernel(self.name, step, core, slot, fast_math) for step, core, slot in steps]
        return _Trace(graph, shapes, kernels, conditions)

    def merged(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
        """As of `Kernel`: its tensors, of which it writes none."""
        return list(read)

    def gradient(self, wanted: Sequence[bool], differentiable: Sequence[bool]) -> CutFunction:
        """The function `(*inputs, *gradients of the differentiable results) -> (*wanted gradients)`."""
        key = (tuple(wanted), tuple(differentiable))
        if key not in self._gradients:

            def bind(notes: Notes) -> Function:
                return cells_gradient_of(self._bind(notes), len(wanted), differentiable, wanted)

            found = CutFunction(bind, f"{self.name}_backward", self._numerics, self.captured, gradient=True)
            found._batched_by = lambda: self.batched().gradient(wanted, differentiable)
            self._gradients[key] = found
        return self._gradients[key]

    def batched(self) -> CutFunction:
        """The function over a batch, which all of its arguments and results have as their first dimension."""
        if self._batched is None:
            self._batched = self._batched_by()
        return self._batched

    def _over_a_batch(self) -> CutFunction:
        def bind(notes: Notes) -> Function:
            return torch.func.vmap(self._bind(notes))

        batched = CutFunction(bind, f"{self.name}_batched", self._numerics, self.captured)
        batched.must_cut = False
        return batched


@dataclass(slots=True)
class _Planned:
    """A kernel for operands that are laid out in one way."""

    source: KernelSource
    kernel: Any = None


class _Kernel:
    """What computes one step."""

    def __init__(
        self, name: str, step: CellStep, core: CoreSource, slots: Sequence[Expression], fast_math: bool
    ) -> None:
        self.step = step
        self._slots = slots
        self._name = name
        self._core = core
        self._fast_math = fast_math
        self._of_layouts: dict[tuple[StepLayout, ...], _Planned] = {}

    def planned(self, inputs: Sequence[Tensor], graph: CellGraph) -> _Planned:
        """The kernel for such arguments."""
        shape = self.step.shape(inputs)
        outputs = [torch.empty(r.shape(shape), device="meta") for r in graph.results]
        return self._with(self._plan(shape, inputs, [p.view(outputs[p.tensor], shape) for p in self.step.outputs]))

    def _plan(self, shape: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Plan:
        # What is written first: the kernel counts in its order.
        return plan_layout([*outputs, *self._views(shape, inputs)])

    def _views(self, shape: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [part.view(inputs[part.tensor], shape) for part in self.step.inputs]

    def _with(self, plan: Plan) -> _Planned:
        found = self._of_layouts.get(plan.layouts)
        if found is None:
            found = self._of_layouts[plan.layouts] = _Planned(_source(self._name, self._core, plan.layouts))
        return found

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        """Computes the step into views of `outputs`."""
        shape = self.step.shape(inputs)
        views = {Role.OUTPUT: outputs, Role.INPUT: self._views(shape, inputs)}
        plan = plan_layout([*outputs, *views[Role.INPUT]])
        planned = self._with(plan)
        target = planned.source.target
        if planned.kernel is None:
            planned.kernel = target.compile(planned.source)
        first = {Role.OUTPUT: 0, Role.INPUT: len(outputs)}
        tensors, sizes = [], [plan.numel]
        for port in planned.source.params:
            tensors.append(views[port.role][port.index])
            sizes += plan.numbers[first[port.role] + port.index]
        sizes += integers(self._core, self._slots, numbers)
        launch(target, planned.kernel, tensors, sizes, plan.numel, fast_math=self._fast_math)


@dataclass(slots=True)
class _Trace:
    """A function for arguments of one kind.

    Attributes:
        graph: what it does.
        shapes: of the arguments that it was traced with.
        kernels: what computes it.
        conditions: on the numbers that it is for.
    """

    graph: CellGraph
    shapes: _Shapes
    kernels: list[_Kernel]
    conditions: Conditions

    @property
    def traced(self) -> CellGraph:
        """As of a kernel on whole tensors: what is known of the results."""
        return self.graph

    def holds(self, numbers: Sequence[Any]) -> bool:
        """Whether it serves these numbers."""
        return hold(self.conditions, numbers)

    def fits(self, shapes: _Shapes) -> bool:
        """Whether it serves arguments of these shapes, too."""
        sizes: dict[int, int] = {}
        for shape, traced, free in zip(shapes, self.shapes, self.graph.free, strict=True):
            for size, known, number in zip(shape, traced, free, strict=True):
                if size != (known if number is None else sizes.setdefault(number, size)):
                    return False
        return True

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """The results."""
        device = inputs[0].device
        results: dict[int, Tensor] = {}
        for number, kernel in enumerate(self.kernels):
            step = kernel.step
            shape = step.shape(inputs)
            here = [i for i, r in enumerate(self.graph.results) if r.step == number]
            for i in here:
                result = self.graph.results[i]
                dtype = self.graph.dtypes[i] if not result.summed else self._terms_dtype(step, i)
                results[i] = torch.empty(result.shape(shape), dtype=dtype, device=device)
            # Of what is summed, the terms, to be summed afterwards.
            outputs = [
                torch.empty(shape, dtype=dtype, device=device)
                if self.graph.results[part.tensor].summed
                else part.view(results[part.tensor], shape)
                for part, dtype in zip(step.outputs, step.dtypes, strict=True)
            ]
            if all(shape):
                kernel.run(inputs, outputs, numbers)
            for part, terms in zip(step.outputs, outputs, strict=True):
                summed = self.graph.results[part.tensor].summed
                if summed:
                    place = part.view(results[part.tensor], shape)
                    for axis in reversed(summed):
                        place = place.select(axis, 0) if shape[axis] else place.squeeze(axis)
                    place.copy_(terms.sum(summed, dtype=terms.dtype))
            for i in here:
                results[i] = results[i].to(self.graph.dtypes[i])
        for i, (result, dtype) in enumerate(zip(self.graph.results, self.graph.dtypes, strict=True)):
            if result.step < 0:
                assert result.constant is not None
                results[i] = torch.full(result.shape(()), result.constant, dtype=dtype, device=device)
        return [results[i] for i in range(len(self.graph.results))]

    def _terms_dtype(self, step: CellStep, result: int) -> torch.dtype:
        return next(d for p, d in zip(step.outputs, step.dtypes, strict=True) if p.tensor == result)


def _serving(traces: Sequence[_Trace], shapes: _Shapes, numbers: Sequence[Any]) -> _Trace | None:
    return next((t for t in traces if t.holds(numbers) and t.fits(shapes)), None)


def _size(size: int | torch.SymInt) -> int:
    """A size, which may be a symbol, in the call that a graph is made for."""
    return int(hint_of(size)) if isinstance(size, torch.SymInt) else size


def _source(name: str, core: CoreSource, layouts: Sequence[StepLayout]) -> KernelSource:
    """The kernel `(*inputs that are used, *results, N, *numbers of what is strided, *numbers)`.

    Args:
        layouts: of the results, and of all inputs.
    """
    w = core.target.writer(sizes=["N"])
    w.begin()
    count = len(core.results)
    inputs = [w.add(port.role, port.index, layouts[count + port.index]) for port in core.arguments]
    results = [w.add(port.role, port.index, layouts[port.index]) for port in core.results]
    numbers = w.add_numbers(core)
    for port in inputs:
        w.load(port.name, port)
    w.call([port.name for port in results], core, [*(port.name for port in inputs), *numbers])
    for port in results:
        w.store(port, port.name)
    return w.finish(f"{name}_kernel", [core], "One program: BLOCK elements.")
