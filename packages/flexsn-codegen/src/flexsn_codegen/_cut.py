"""Functions that cut a dimension into pieces and join them: halves of a gate, rotary embeddings, channels, cells.

Such a function becomes a kernel on the elements of one piece, for which each piece of an argument or a result is an
operand with strides of its own. Nothing is copied, and nothing is read twice: see `flexsn_graph._cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._core import emit_core
from flexsn_codegen._launch import launch, target_on
from flexsn_codegen._layout import Plan, plan_layout
from flexsn_codegen._numerics import Numerics
from flexsn_codegen._source import CoreSource, KernelSource, StepLayout
from flexsn_codegen.targets import Target
from flexsn_graph import CellGraph, CellStep, Role, cells_gradient_of, trace_cells

_MAX_PLANS = 1024
_Shapes = tuple[tuple[int, ...], ...]


class CutFunction:
    """A function that cuts. One trace serves all sizes of the dimensions that it does not cut.

    Args:
        fn: from tensors to a tensor or a tuple of tensors.
        name: of its kernels.
        numerics: how they compute.
        gradient: whether `fn` is made by `cells_gradient_of`.
    """

    def __init__(self, fn: Callable[..., Any], name: str, numerics: Numerics, *, gradient: bool = False) -> None:
        self._gradient = gradient
        self._must_cut = True
        self._fn = fn
        self._name = name
        self._numerics = numerics
        self._traces: dict[tuple[Any, ...], list[_Trace]] = {}
        self._of_shapes: dict[tuple[Any, ...], _Trace] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the kernels: a tensor or a tuple of them, as the function returns."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            return _Autograd.apply(self, *inputs)
        return self.run(inputs, (False,) * len(inputs))

    def run(self, inputs: Sequence[Tensor], requires_grad: tuple[bool, ...]) -> Any:
        """The same, without autograd."""
        trace = self.trace(inputs, requires_grad)
        results = trace.run([t.detach() for t in inputs])
        return results[0] if trace.graph.single else tuple(results)

    def sources(self, *inputs: Tensor, target: Target) -> list[KernelSource]:
        """The kernels for such arguments, mostly one. Meta tensors will do."""
        trace = self.trace(inputs, (False,) * len(inputs), target)
        return [kernel.planned(inputs, trace.graph).source for kernel in trace.kernels]

    def trace(
        self,
        inputs: Sequence[Tensor],
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
        self._must_cut &= must_cut
        target = target or target_on(inputs[0].device, self._name)
        kinds = tuple((t.dtype, t.dim()) for t in inputs)
        key = (target.name, inputs[0].device.type, requires_grad, kinds)
        shapes = tuple(tuple(t.shape) for t in inputs)
        found = self._of_shapes.get((shapes, key))
        if found is None:
            known = self._traces.setdefault(key, [])
            found = next((t for t in known if t.fits(shapes)), None)
            if found is None:
                graph = trace_cells(
                    self._fn, inputs, requires_grad, self._name, gradient=self._gradient, must_cut=self._must_cut
                )
                found = _Trace(graph, shapes, [self._kernel(step, target) for step in graph.steps])
                known.append(found)
            if len(self._of_shapes) >= _MAX_PLANS:
                self._of_shapes.clear()
            self._of_shapes[shapes, key] = found
        return found

    def _kernel(self, step: CellStep, target: Target) -> _Kernel:
        precision, fast_math = self._numerics.precision, self._numerics.fast_math
        core = emit_core(step.step, self._name, prune=True, precision=precision, fast_math=fast_math, target=target)
        return _Kernel(self._name, step, core, fast_math)

    def gradient(self, graph: CellGraph, wanted: tuple[bool, ...], gradients: dict[Any, CutFunction]) -> CutFunction:
        """The function `(*inputs, *gradients of the differentiable results) -> (*wanted gradients)`."""
        if wanted not in gradients:
            fn = cells_gradient_of(self._fn, len(wanted), graph.differentiable, wanted)
            gradients[wanted] = CutFunction(fn, f"{self._name}_backward", self._numerics, gradient=True)
        return gradients[wanted]


@dataclass(slots=True)
class _Planned:
    """A kernel for operands that are laid out in one way."""

    source: KernelSource
    kernel: Any = None


class _Kernel:
    """What computes one step."""

    def __init__(self, name: str, step: CellStep, core: CoreSource, fast_math: bool) -> None:
        self.step = step
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

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Computes the step into views of `outputs`."""
        shape = self.step.shape(inputs)
        views = {Role.OUTPUT: outputs, Role.INPUT: self._views(shape, inputs)}
        plan = plan_layout([*outputs, *views[Role.INPUT]])
        planned = self._with(plan)
        target = planned.source.target
        if planned.kernel is None:
            planned.kernel = target.compile(planned.source)
        first = {Role.OUTPUT: 0, Role.INPUT: len(outputs)}
        tensors, numbers = [], [plan.numel]
        for port in planned.source.params:
            tensors.append(views[port.role][port.index])
            numbers += plan.numbers[first[port.role] + port.index]
        launch(target, planned.kernel, tensors, numbers, plan.numel, fast_math=self._fast_math)


@dataclass(slots=True)
class _Trace:
    """A function for arguments of one kind.

    Attributes:
        graph: what it does.
        shapes: of the arguments that it was traced with.
        kernels: what computes it.
        gradients: its gradients, by the arguments that want one.
    """

    graph: CellGraph
    shapes: _Shapes
    kernels: list[_Kernel]
    gradients: dict[Any, CutFunction] = field(default_factory=dict)

    def fits(self, shapes: _Shapes) -> bool:
        """Whether it serves arguments of these shapes, too."""
        sizes: dict[int, int] = {}
        for shape, traced, free in zip(shapes, self.shapes, self.graph.free, strict=True):
            for size, known, number in zip(shape, traced, free, strict=True):
                if size != (known if number is None else sizes.setdefault(number, size)):
                    return False
        return True

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
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
                kernel.run(inputs, outputs)
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


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: CutFunction, *inputs: Tensor) -> Any:
        wanted = tuple(ctx.needs_input_grad[1:])
        trace = function.trace(inputs, wanted)
        ctx.function, ctx.trace = function, trace
        ctx.save_for_backward(*inputs)
        results = trace.run([t.detach() for t in inputs])
        there = trace.graph.differentiable
        ctx.mark_non_differentiable(*(r for r, one in zip(results, there, strict=True) if not one))
        return results[0] if trace.graph.single else tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        inputs, graph = ctx.saved_tensors, ctx.trace.graph
        wanted = tuple(ctx.needs_input_grad[1:])
        given = [c for c, there in zip(cotangents, graph.differentiable, strict=True) if there]
        if not given:
            return (None,) * (1 + len(inputs))
        found = iter(ctx.function.gradient(graph, wanted, ctx.trace.gradients)(*inputs, *given))
        return None, *(next(found) if want else None for want in wanted)


def _source(name: str, core: CoreSource, layouts: Sequence[StepLayout]) -> KernelSource:
    """The kernel `(*inputs that are used, *results, N, *numbers of what is strided)`.

    Args:
        layouts: of the results, and of all inputs.
    """
    w = core.target.writer(sizes=["N"])
    w.begin()
    count = len(core.results)
    inputs = [w.add(port.role, port.index, layouts[count + port.index]) for port in core.arguments]
    results = [w.add(port.role, port.index, layouts[port.index]) for port in core.results]
    for port in inputs:
        w.load(port.name, port)
    w.call([port.name for port in results], core, [port.name for port in inputs])
    for port in results:
        w.store(port, port.name)
    return w.finish(f"{name}_kernel", [core], "One program: BLOCK elements.")
