"""Any function of single elements as one kernel: read the arguments once, write the results once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_codegen._core import emit_core
from flexsn_codegen._cut import CutFunction
from flexsn_codegen._launch import launch, target_on
from flexsn_codegen._layout import Plan, plan_layout
from flexsn_codegen._numerics import Numerics, Precision
from flexsn_codegen._source import CoreSource, KernelSource, StepLayout
from flexsn_codegen.errors import ArgumentError, AutogradError, DeviceError
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import (
    MAX_DIMENSIONS,
    ArgumentType,
    NothingCutError,
    PointwiseGraph,
    Role,
    TorchError,
    gradient_of,
    trace_pointwise,
)

_MAX_PLANS = 1024


def pointwise(
    fn: Callable[..., Any] | fx.Graph,
    *,
    autograd: bool = False,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Pointwise:
    """Makes one Triton kernel of a function that works element by element.

    Args:
        fn: takes tensors, returns a tensor or a tuple of tensors; written for arguments of one common shape.
            It may use any torch op that works element by element, in-place ones on local values included.
            Tensors of no dimension promote as in eager mode. An `fx.Graph` with such ops works too.
        autograd: whether gradients can flow through, and gradients of gradients; each backward is one kernel
            more, which computes what it needs again from the arguments.
        name: for the kernel; by default the function's.
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` computes them in float32 and rounds results and gradients alone.
        fast_math: approximate division, `sqrt`, `exp`, `exp2`, `tanh` and `pow` in float32, fused multiply-add,
            and denormals that may count as zero.

    Returns:
        A callable on tensors of any broadcasting shapes and strides, on one device. Each result has the
        shape that all arguments broadcast to.

    Raises:
        PrecisionError: an unknown `precision`.
        UnsupportedOpError: on the first call, an op that is not pointwise or has no rule; names it and
            the line.
        TraceError: on the first call, `fn` captures a tensor, computes with shapes, or returns something else.
        ArgumentError, DeviceError: on any call, see there.

    Example:
        >>> swiglu = pointwise(lambda x, gate: x * torch.nn.functional.silu(gate))
        >>> y = swiglu(torch.randn(8, 64), torch.randn(64))
    """
    return Pointwise(fn, autograd=autograd, name=name, numerics=Numerics(precision, fast_math))


class Pointwise:
    """What `pointwise` returns. One trace per kind of arguments (dtypes, number of dimensions), whatever the sizes."""

    def __init__(
        self,
        fn: Callable[..., Any] | fx.Graph,
        *,
        autograd: bool,
        name: str | None,
        numerics: Numerics,
        gradient: bool = False,
    ) -> None:
        self._gradient = gradient
        self._fn = fx.GraphModule({}, fn) if isinstance(fn, fx.Graph) else fn
        self._autograd = autograd
        self._numerics = numerics
        self._name: str = name or getattr(fn, "__name__", None) or type(fn).__name__
        self._cores: dict[tuple[Any, ...], _Core] = {}
        self._built: dict[tuple[Any, ...], _Built] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._cut = CutFunction(self._fn, self._name, numerics)
        self._cuts: set[tuple[Any, ...]] = set()

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the kernel: a tensor or a tuple of them, as the function returns."""
        _check(inputs, self._name)
        wants = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if wants and self._autograd and self._is_cut(inputs, _flags(inputs, True)):
            return self._cut(*inputs)
        if not wants and self._is_cut(inputs, _flags(inputs, False)):
            return self._cut.run(inputs, _flags(inputs, False))
        if not wants:
            return self._run(inputs, _flags(inputs, False))
        if not self._autograd:
            raise AutogradError(
                f"an argument of {self._name} requires a gradient; make it with "
                "pointwise(..., autograd=True), or call it under torch.no_grad()."
            )
        return _Autograd.apply(self, *inputs)

    def source(self, *inputs: Tensor, target: Target = TRITON) -> KernelSource:
        """The kernel for such arguments: its name, source and parameters. Meta tensors will do.

        Args:
            target: what it is written in, wherever the tensors are: `TRITON`, or `targets.cpp.CPP`.
        """
        if not all(isinstance(t, Tensor) for t in inputs) or not inputs:
            raise ArgumentError(f"{self._name} takes tensors.")
        plan = self._plan(inputs)
        return self._build(inputs, plan, _flags(inputs, False), target).source

    def traced(self, *inputs: Tensor) -> PointwiseGraph:
        """The graph for such arguments."""
        return self._build(inputs, self._plan(inputs), _flags(inputs, self._autograd), TRITON).core.traced

    def _is_cut(self, inputs: Sequence[Tensor], requires_grad: tuple[bool, ...], target: Target | None = None) -> bool:
        """Whether the function cuts arguments into pieces: it is then another kind of kernel.

        Raises:
            The reason why it is a kernel of neither kind.
        """
        kinds = (requires_grad, target, tuple((t.dtype, t.dim()) for t in inputs))
        if kinds in self._cuts:
            return True
        target = target or target_on(inputs[0].device, self._name)
        try:
            self._build(inputs, self._plan(inputs), requires_grad, target)
            return False
        except Exception as error:
            if self._gradient:
                raise
            self._try_to_cut(inputs, requires_grad, target, error)
        if _broadcast(inputs):  # else it is found out as fast by looking at the shapes
            self._cuts.add(kinds)
        return True

    def _try_to_cut(
        self, inputs: Sequence[Tensor], requires_grad: tuple[bool, ...], target: Target, error: Exception
    ) -> None:
        try:
            self._cut.trace(inputs, requires_grad, target)
        except NothingCutError:
            raise error from None
        except TorchError as second:
            if isinstance(error, ArgumentError):
                raise error from second
            raise second from None  # it speaks of the arguments' own shapes

    def _plan(self, inputs: Sequence[Tensor]) -> Plan:
        key = tuple((t.shape, t.stride()) for t in inputs)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = plan_layout(inputs)
        return plan

    def _build(
        self, inputs: Sequence[Tensor], plan: Plan, requires_grad: tuple[bool, ...], target: Target
    ) -> _Built:
        kinds = tuple((t.dtype, t.dim() == 0) for t in inputs)
        key = (target.name, plan.dimensions, inputs[0].device.type, requires_grad, kinds)
        built = self._built.get((plan.layouts, *key))
        if built is None:
            core = self._cores.get(key)
            if core is None:
                core = self._cores[key] = self._trace(inputs, plan.dimensions, requires_grad, target)
            source = _source(self._name, core.source, plan.layouts, len(core.traced.dtypes))
            built = self._built[(plan.layouts, *key)] = _Built(core, source)
        return built

    def _trace(
        self, inputs: Sequence[Tensor], dimensions: int, requires_grad: tuple[bool, ...], target: Target
    ) -> _Core:
        if dimensions > MAX_DIMENSIONS:
            raise ArgumentError(f"{self._name} takes tensors of at most {MAX_DIMENSIONS} dimensions.")
        arguments = [
            ArgumentType(t.dtype, t.dim() == 0 and dimensions > 0, want)
            for t, want in zip(inputs, requires_grad, strict=True)
        ]
        device = inputs[0].device
        traced = trace_pointwise(self._fn, arguments, dimensions, device, self._name, gradient=self._gradient)
        precision, fast_math = self._numerics.precision, self._numerics.fast_math
        source = emit_core(
            traced.step, self._name, prune=True, precision=precision, fast_math=fast_math, target=target
        )
        return _Core(traced, source, arguments)

    def _run(self, inputs: Sequence[Tensor], requires_grad: tuple[bool, ...]) -> Any:
        plan = self._plan(inputs)
        built = self._build(inputs, plan, requires_grad, target_on(inputs[0].device, self._name))
        results = [plan.empty(dtype, inputs[0].device) for dtype in built.core.traced.dtypes]
        if plan.numel:
            built.launch([t.detach() for t in inputs], results, plan, fast_math=self._numerics.fast_math)
        return results[0] if built.core.traced.single else tuple(results)

    def gradient(self, inputs: Sequence[Tensor], wanted: tuple[bool, ...]) -> Pointwise:
        """The kernel `(*inputs, *gradients of the differentiable results) -> (*wanted gradients)`.

        Each gradient has the shape that all arguments broadcast to; that of an argument without dimensions may be
        of a wider dtype, to be summed in it.
        """
        core = self._build(inputs, self._plan(inputs), wanted, TRITON).core
        gradient = core.gradients.get(wanted)
        if gradient is None:
            fn = gradient_of(self._fn, len(inputs), core.traced.differentiable, wanted)
            name = f"{self._name}_backward"
            gradient = Pointwise(fn, autograd=self._autograd, name=name, numerics=self._numerics, gradient=True)
            core.gradients[wanted] = gradient
        return gradient


@dataclass(frozen=True, slots=True)
class _Core:
    """A function for one kind of arguments, and its gradients by the arguments that want one."""

    traced: PointwiseGraph
    source: CoreSource
    arguments: Sequence[ArgumentType]
    gradients: dict[tuple[bool, ...], Pointwise] = field(default_factory=dict)


@dataclass(slots=True)
class _Built:
    """A core in a kernel for one layout of the arguments; compiled at the first launch."""

    core: _Core
    source: KernelSource
    kernel: Any = None

    def launch(self, inputs: Sequence[Tensor], results: Sequence[Tensor], plan: Plan, *, fast_math: bool) -> None:
        target = self.source.target
        if self.kernel is None:
            self.kernel = target.compile(self.source)
        tensors = {Role.INPUT: inputs, Role.OUTPUT: results}
        numbers = [plan.numel]
        for param in self.source.params:
            if param.role is Role.INPUT:
                numbers += plan.numbers[param.index]
        arguments = [tensors[p.role][p.index] for p in self.source.params]
        launch(target, self.kernel, arguments, numbers, plan.numel, fast_math=fast_math)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Pointwise, *inputs: Tensor) -> Any:
        wanted = tuple(ctx.needs_input_grad[1:])
        results = kernel._run(inputs, wanted)
        built = kernel._build(inputs, kernel._plan(inputs), wanted, target_on(inputs[0].device, kernel._name))
        ctx.kernel = kernel
        ctx.differentiable = built.core.traced.differentiable
        ctx.save_for_backward(*inputs)
        as_tuple = (results,) if isinstance(results, Tensor) else results
        ctx.mark_non_differentiable(*(r for r, there in zip(as_tuple, ctx.differentiable, strict=True) if not there))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        inputs = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[1:])
        given = [c for c, there in zip(cotangents, ctx.differentiable, strict=True) if there]
        if not given:
            return (None,) * (1 + len(inputs))
        # Recorded, if gradients of gradients are wanted: it is such a kernel itself.
        found = iter(ctx.kernel.gradient(inputs, wanted)(*inputs, *given))
        return None, *(
            next(found).sum_to_size(t.shape).to(t.dtype) if want else None
            for t, want in zip(inputs, wanted, strict=True)
        )


def _broadcast(inputs: Sequence[Tensor]) -> bool:
    try:
        torch.broadcast_shapes(*(t.shape for t in inputs))
    except RuntimeError:
        return False
    return True


def _flags(inputs: Sequence[Tensor], follow: bool) -> tuple[bool, ...]:
    """For each argument, whether autograd is to follow what is computed from it."""
    return tuple(follow and t.requires_grad for t in inputs)


def _check(inputs: Sequence[Any], name: str) -> None:
    if not inputs:
        raise ArgumentError(f"{name} was called without tensors; a kernel needs one to take the shape from.")
    for i, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"argument {i} of {name} is a {type(value).__name__}, not a tensor. Fix a number with "
                "functools.partial or a closure; each value of it is a kernel of its own."
            )
        if not TRITON.supports(value.dtype) or value.layout is not torch.strided:
            raise ArgumentError(f"argument {i} of {name} is {value.dtype}, {value.layout}; not supported.")
    devices = {t.device for t in inputs}
    if len(devices) > 1:
        raise DeviceError(f"the arguments of {name} are on {sorted(map(str, devices))}: move them to one device.")


def _source(name: str, core: CoreSource, layouts: Sequence[StepLayout], num_results: int) -> KernelSource:
    """The kernel `(*inputs that are used, *results, N, *numbers of the strided inputs)`."""
    w = core.target.writer(sizes=["N"])
    w.begin()
    inputs = [w.add(port.role, port.index, layouts[port.index]) for port in core.arguments]
    results = [w.add(Role.OUTPUT, i) for i in range(num_results)]
    for port in inputs:
        w.load(port.name, port)
    w.call([port.name for port in results], core, [port.name for port in inputs])
    for port in results:
        w.store(port, port.name)
    return w.finish(f"{name}_kernel", [core], "One program: BLOCK elements.")
