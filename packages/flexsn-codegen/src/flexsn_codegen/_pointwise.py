"""Any function of single elements as one kernel: read the arguments once, write the results once."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor, fx

from flexsn_codegen._calls import Parts, Structure, check_signature, put_together, results_together, take_apart
from flexsn_codegen._cut import CutFunction
from flexsn_codegen._foreach import Step, Steps, place_of
from flexsn_codegen._kernel import Kernel, kernel_of
from flexsn_codegen._launch import target_on
from flexsn_codegen._layout import plan_layout
from flexsn_codegen._numerics import Numerics, Precision
from flexsn_codegen._pointwise_op import Transformed, pointwise_in_place_op, pointwise_op
from flexsn_codegen._source import KernelSource
from flexsn_codegen._torch_private_modes import constant, is_forward_mode, is_plain, is_transformed
from flexsn_codegen._writes import check_apart, check_outs, check_written
from flexsn_codegen.errors import (
    ArgumentError,
    AutogradError,
    CompilationError,
    CompilerMissingError,
    DeviceError,
    SignatureError,
    TransformError,
    WriteError,
)
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import MutationError, NothingCutError, PointwiseGraph, TorchError
from flexsn_graph.reads import Reads

# Functions that cut are kept for as many kinds of calls.
_MAX_CUTS = 256

P = ParamSpec("P")
R = TypeVar("R")


@overload
def pointwise(
    fn: fx.Graph,
    *,
    autograd: bool = False,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Pointwise[..., Tensor | tuple[Tensor, ...]]: ...


@overload
def pointwise(
    fn: Callable[P, R],
    *,
    autograd: bool = False,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Pointwise[P, R]: ...


def pointwise(
    fn: Callable[..., object] | fx.Graph,
    *,
    autograd: bool = False,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> object:
    """Makes one kernel of a function that works element by element.

    Args:
        fn: a function, a module or an `fx.Graph`, written for tensors of one common shape. It may use any torch op that
            works element by element, and returns a tensor, or tuples, lists and dicts of tensors. Tensors of no
            dimension promote as in eager mode. What it writes in place to an argument is written to the caller's
            tensor, by the same kernel; it may then return nothing. Tensors that it captures (a module's parameters, a
            closure's) are read as they are at each call, with gradients.
        autograd: whether gradients can flow through, and gradients of gradients; each backward is one kernel
            more, which computes what it needs again from the arguments.
        name: for the kernel; by default the function's.
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` computes them in float32 and rounds results and gradients alone.
        fast_math: approximate division, `sqrt`, `exp`, `exp2`, `tanh` and `pow` in float32, fused multiply-add,
            and denormals that may count as zero.

    Returns:
        What is called as `fn` is, on tensors of any broadcasting shapes and strides on one device, and on Python
        numbers, which the kernel takes at run time. Each result has the shape that all arguments broadcast to.

    Raises:
        PrecisionError: an unknown `precision`.
        UnsupportedOpError: on the first call, an op that is not pointwise or has no rule; names it and
            the line.
        TraceError: on the first call, `fn` computes with shapes, or returns something else.
        ArgumentError, DeviceError, AutogradError, WriteError: on any call, see there.

    Example:
        >>> swiglu = pointwise(lambda x, gate, limit: (x * torch.nn.functional.silu(gate)).clamp(max=limit))
        >>> y = swiglu(torch.randn(8, 64), torch.randn(64), 6.0)
    """
    numerics = Numerics(precision, fast_math)
    made = Pointwise(cast(Any, fn), autograd=autograd, name=name, numerics=numerics)
    return made


class Pointwise(Generic[P, R]):
    """What `pointwise` returns. One trace per kind of arguments (dtypes, number of dimensions), whatever the sizes and
    numbers."""

    def __init__(
        self, fn: Callable[P, R] | fx.Graph, *, autograd: bool, name: str | None, numerics: Numerics
    ) -> None:
        self._fn: Callable[..., Any] = fx.GraphModule({}, fn) if isinstance(fn, fx.Graph) else fn
        self._autograd = autograd
        self._numerics = numerics
        self._name: str = name or getattr(fn, "__name__", None) or type(fn).__name__
        self._kernels: dict[tuple[Any, ...], tuple[Kernel, Reads]] = {}
        self._cuts: dict[tuple[Any, ...], CutFunction] = {}
        self._steps = Steps()
        self._captured: dict[str, tuple[Tensor, ...]] = {}
        self._handle = next(_numbers)
        _functions[self._handle] = self
        functools.update_wrapper(self, self._fn, assigned=("__doc__",), updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel; returns what the function returns."""
        if not torch.compiler.is_dynamo_compiling():
            return cast(R, self._call(args, kwargs, None))
        structure, parts = take_apart(self._name, args, kwargs)
        return cast(R, self._by_operator(structure, parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is loaded from a file, compile by themselves."""
        return _remade, (self._fn, self._autograd, self._name, self._numerics)

    def into(self, out: Tensor | Sequence[Tensor], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel, and writes its results to tensors that are there, as ``out=`` of torch's functions does.

        Args:
            out: a tensor for each result, of its shape and dtype; of any strides. One may be an argument, too.

        Raises:
            ArgumentError: they are not as the results.
            WriteError: one of them overlaps with itself, or with an argument that it is not.
        """
        return cast(R, self._call(args, kwargs, [out] if isinstance(out, Tensor) else list(out)))

    def foreach(self, *args: Any, **kwargs: Any) -> list[R]:
        """Calls the function for each place of some lists, as an optimizer's step for each parameter.

        On a GPU, one launch does all that are dense and of the same dtypes; what is strided is launched by itself. On
        the CPU, it is one launch after the other.

        Args:
            args, kwargs: as of the function; in the place of a tensor, a list or a tuple of tensors, all of one length.
                What is no list (numbers, flags, one tensor for all) is the same for each.

        Returns:
            What the function returns, for each place.

        Raises:
            ArgumentError: the lists are of several lengths, or there is none.
            AutogradError: a gradient is asked for. Call it under `torch.no_grad()`.
            Others: as for a call.
        """
        lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
        lengths = sorted({len(value) for value in lists})
        if len(lengths) != 1:
            raise ArgumentError(
                f"{self._name}.foreach goes over lists of tensors of one length; these are of {lengths or 'none'}."
            )
        calls = [_place_in(args, kwargs, i) for i in range(lengths[0])]
        if torch.compiler.is_dynamo_compiling():
            return [cast(R, self._by_operator(*take_apart(self._name, *call))) for call in calls]
        return cast(list[R], self._over_lists(calls, [*args, *kwargs.values()]))

    def _over_lists(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], values: Sequence[Any]) -> list[Any]:
        if not calls:
            return []
        structure, parts = take_apart(self._name, *calls[0])
        every = [t for value in values for t in (value if _is_list(value) else [value]) if isinstance(t, Tensor)]
        if not is_plain(every):
            return [self._by_operator(*take_apart(self._name, *call)) for call in calls]
        key = (structure, len(calls), torch.is_grad_enabled(), *map(place_of, every))
        step = self._steps.known.get(key)
        if step is not None and step.fits(parts.numbers):
            step.run(parts.numbers)
            for tensor in every:
                if tensor.data_ptr() in step.written:
                    _tell_written(tensor)
            return [None] * len(calls)
        return self._first_over_lists(key, calls, parts.numbers)

    def _first_over_lists(
        self, key: tuple[Any, ...], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], numbers: Sequence[Any]
    ) -> list[Any]:
        prepared = []
        fetched: dict[str, Any] = {}
        for call in calls:
            structure, parts = take_apart(self._name, *call)
            self._check(parts.tensors)
            kernel, captured = self._kernel(structure, parts.tensors, parts.numbers)
            tensors = [*parts.tensors, *captured]
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                raise AutogradError(_WRITES.format(f"{self._name}.foreach"))
            if kernel.written:
                self._check_written(kernel, tensors)
            fetched[kernel.key] = (self._reads_of(kernel).fetch, captured)
            prepared.append((kernel, tensors))
        launches, returned = [], []
        for kernel, tensors in prepared:
            target = target_on(tensors[0].device, self._name)
            variant = kernel.variant(tensors, numbers, [False] * len(tensors), target)
            results, todo = kernel.prepare([t.detach() for t in tensors], numbers, variant)
            launches.append((kernel, variant, todo))
            returned.append(results_together(kernel.result, results, tensors))
        groups = self._steps.run_all(launches, numbers)
        for kernel, tensors in prepared:
            self._bump(kernel, tensors, None)
        if groups is not None and all(one is None for one in returned):
            written = frozenset(tensors[i].data_ptr() for kernel, tensors in prepared for i in kernel.written)
            self._steps.keep(key, Step(groups, list(fetched.values()), written))
        return returned

    def _reads_of(self, kernel: Kernel) -> Reads:
        return next(reads for known, reads in self._kernels.values() if known is kernel)

    def source(self, *args: Any, target: Target = TRITON, **kwargs: Any) -> KernelSource:
        """The kernel for such arguments: its name, source and parameters. Meta tensors will do.

        Args:
            target: what it is written in, wherever the tensors are: `TRITON`, or `targets.cpp.CPP`.
        """
        kernel, tensors, numbers = self._known(args, kwargs)
        return kernel.source(tensors, numbers, target)

    def traced(self, *args: Any, **kwargs: Any) -> PointwiseGraph:
        """The graph for such arguments."""
        kernel, tensors, numbers = self._known(args, kwargs)
        wanted = [self._autograd and t.requires_grad for t in tensors]
        return kernel.variant(tensors, numbers, wanted, TRITON).traced

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        """The kernel `(*arguments, *gradients of the differentiable results) -> (*wanted gradients)`.

        Args:
            inputs: as in a call, for a function of tensors alone.
            wanted: for each, whether its gradient is.
        """
        kernel, tensors, numbers = self._known(tuple(inputs), {})
        flags = [*wanted, *(t.requires_grad for t in kernel.captured)]
        traced = kernel.variant(tensors, numbers, flags, TRITON).traced
        if not any(traced.differentiable):
            raise AutogradError(f"no result of {self._name} is differentiable by the arguments asked for.")
        return Gradient(kernel.gradient(flags, traced.differentiable))

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor] | None) -> Any:
        structure, parts = take_apart(self._name, args, kwargs)
        self._check(parts.tensors)
        if not is_plain(parts.tensors):
            if outs is not None:
                raise TransformError(
                    f"{self._name}.into cannot be recorded or transformed. Call {self._name}, and copy its results."
                )
            return self._by_operator(structure, parts)
        cut = None
        if self._cuts:
            cut = self._cuts.get(self._kind(structure, parts))
        if cut is None:
            try:
                return self._run(structure, parts, outs)
            except _OF_A_CALL:
                raise
            except Exception as error:
                cut = self._made_of_pieces(structure, parts, outs, error)
        return self._run_cut(cut, structure, parts)

    def _run(self, structure: Structure, parts: Parts, outs: list[Tensor] | None) -> Any:
        """By a kernel on whole tensors."""
        kernel, captured = self._kernel(structure, parts.tensors, parts.numbers)
        tensors = parts.tensors
        if captured or not tensors:
            tensors = [*tensors, *captured]
            if not tensors:
                raise ArgumentError(_WITHOUT_TENSORS.format(self._name))
            self._check(tensors)
        if kernel.written:
            self._check_written(kernel, tensors)
        wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants:
            self._check_autograd(kernel, outs)
            results = _Autograd.apply(kernel, parts.numbers, *tensors)
        elif outs is None:
            results = kernel.run(tensors, parts.numbers, [False] * len(tensors))[0]
        else:
            self._check_outs(kernel, tensors, parts.numbers, outs)
            results = kernel.run(tensors, parts.numbers, [False] * len(tensors), outs)[0]
        written = self._bump(kernel, tensors, outs) if kernel.written or outs else ()
        return results_together(kernel.result, results, written)

    # -- functions that cut dimensions into pieces ---------------------------------------------------------------

    def _kind(self, structure: Structure, parts: Parts) -> tuple[Any, ...]:
        """What decides whether a function is a kernel on pieces; numbers become part of such a one."""
        kinds = [(t.dtype, t.dim(), t.device.type, t.requires_grad) for t in parts.tensors]
        return (structure, torch.is_grad_enabled(), *kinds, *map(repr, parts.numbers))

    def _made_of_pieces(
        self, structure: Structure, parts: Parts, outs: list[Tensor] | None, error: Exception
    ) -> CutFunction:
        """The function as one that cuts its arguments, where it is no kernel on whole tensors.

        Raises:
            The reason why it is a kernel of neither kind.
        """
        tensors, numbers = parts.tensors, list(parts.numbers)
        if not tensors or outs is not None:
            raise error

        def function(*values: Tensor) -> Any:
            args, kwargs = put_together(structure, values, numbers)
            return self._fn(*args, **kwargs)

        plain_call = structure == ("call", (("tensor",),) * len(tensors), ())
        cut = CutFunction(self._fn if plain_call else function, self._name, self._numerics)
        grad = torch.is_grad_enabled()
        try:
            # What torch refuses for the tracer's shapes may be fine for the arguments' own.
            wanted = tuple(grad and t.requires_grad for t in tensors)
            cut.trace(tensors, wanted, must_cut=not isinstance(error, TorchError))
        except NothingCutError:
            raise error from None
        except (TorchError, MutationError) as second:
            if isinstance(error, ArgumentError) or isinstance(second, MutationError):
                raise error from second
            raise second from None  # it speaks of the arguments' own shapes
        if len(self._cuts) >= _MAX_CUTS:
            self._cuts.clear()
        self._cuts[self._kind(structure, parts)] = cut
        return cut

    def _run_cut(self, cut: CutFunction, structure: Structure, parts: Parts) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in parts.tensors) and not self._autograd:
            raise AutogradError(_WITHOUT_AUTOGRAD.format(self._name))
        return cut(*parts.tensors)

    # -- in what others see ----------------------------------------------------------------------------------------

    def _by_operator(self, structure: Structure, parts: Parts) -> Any:
        """The same in what a compiler or a transform sees."""
        tensors = parts.tensors
        if is_forward_mode():
            raise TransformError(
                f"{self._name} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad). Use reverse mode "
                "(grad, vjp, jacrev), or differentiate the function that the kernel was made of."
            )
        dims = 0
        for tensor in tensors:
            dims = max(dims, tensor.dim())
        kinds = tuple([(t.dtype, t.dim() == 0) for t in tensors])
        device = tensors[0].device.type if tensors else "cpu"
        key, num_captured, written, result = _prepared(self._handle, structure, kinds, dims, device)
        if num_captured:
            tensors = [*tensors, *self._captured[key]]
        if not tensors:
            raise ArgumentError(_WITHOUT_TENSORS.format(self._name))
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    if written:
                        raise AutogradError(_WRITES.format(self._name))
                    if not self._autograd:
                        raise AutogradError(_WITHOUT_AUTOGRAD.format(self._name))
        if not written:
            scalars = [t.dim() == 0 for t in tensors]
            if not torch.compiler.is_dynamo_compiling() and is_transformed():
                found = Transformed.apply(kernel_of(key), tuple(parts.numbers), tuple(scalars), *tensors)
                return results_together(result, found, ())
            results = pointwise_op(tensors, parts.numbers, scalars, key)
            return results_together(result, results, ())
        read = [t for i, t in enumerate(tensors) if i not in written]
        changed = [tensors[i] for i in written]
        results = pointwise_in_place_op(read, changed, parts.numbers, key)
        return results_together(result, results, tensors)

    def _kernel(
        self, structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        """The kernel for such a call, and the captured tensors as they are now."""
        key = (structure, *[(t.dtype, t.dim(), t.device.type) for t in tensors])
        found = self._kernels.get(key)
        if found is not None:
            kernel, reads = found
            captured = reads.fetch()
            if captured is not None:
                return kernel, captured
        check_signature(self._fn, self._name, structure)
        plan_layout(tensors)  # they broadcast, or it says so
        reads = Reads(self._fn)
        try:
            kernel = Kernel.of(
                self._fn, self._name, self._numerics, structure, tensors, numbers, autograd=self._autograd, reads=reads
            )
        except (TypeError, TorchError):
            if tensors or isinstance(self._fn, torch.nn.Module):
                raise
            raise ArgumentError(_WITHOUT_TENSORS.format(self._name)) from None
        self._kernels[key] = kernel, reads
        self._captured[kernel.key] = kernel.captured
        return kernel, kernel.captured

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kernel, list[Tensor], list[Any]]:
        structure, parts = take_apart(self._name, args, kwargs)
        kernel, captured = self._kernel(structure, parts.tensors, parts.numbers)
        tensors = [*parts.tensors, *captured]
        if not tensors:
            raise ArgumentError(_WITHOUT_TENSORS.format(self._name))
        return kernel, tensors, parts.numbers

    # -- what may be called so ---------------------------------------------------------------------------------

    def _check(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device if tensors else None
        for i, value in enumerate(tensors):
            if not TRITON.supports(value.dtype) or value.layout is not torch.strided:
                raise ArgumentError(f"tensor {i} of {self._name} is {value.dtype}, {value.layout}; not supported.")
            if value.device != device:
                devices = sorted({str(t.device) for t in tensors})
                raise DeviceError(f"the arguments of {self._name} are on {devices}: move them to one device.")

    def _check_written(self, kernel: Kernel, tensors: Sequence[Tensor]) -> None:
        for i in kernel.written:
            what = f"tensor {i}"
            check_written(self._name, what, tensors[i])
            for j, other in enumerate(tensors):
                if j != i:
                    check_apart(self._name, what, tensors[i], f"tensor {j}", other, may_be_same=False)

    def _check_autograd(self, kernel: Kernel, outs: Sequence[Tensor] | None) -> None:
        if kernel.written or outs is not None:
            raise AutogradError(_WRITES.format(self._name))
        if not self._autograd:
            raise AutogradError(_WITHOUT_AUTOGRAD.format(self._name))

    def _check_outs(
        self, kernel: Kernel, tensors: Sequence[Tensor], numbers: Sequence[Any], outs: Sequence[Tensor]
    ) -> None:
        if kernel.written:
            raise ArgumentError(f"{self._name} writes to its arguments already: call it without `into`.")
        target = target_on(tensors[0].device, self._name)
        dtypes = kernel.variant(tensors, numbers, [False] * len(tensors), target).traced.dtypes
        check_outs(self._name, outs, dtypes, kernel.plan(tensors).shape, tensors[0].device)
        for i, out in enumerate(outs):
            what = f"tensor {i} of out="
            check_written(self._name, what, out)
            for j, other in enumerate(tensors):
                check_apart(self._name, what, out, f"tensor {j}", other, may_be_same=True)
            for j, other in enumerate(outs):
                if j != i:
                    check_apart(self._name, what, out, f"tensor {j} of out=", other, may_be_same=False)

    def _bump(self, kernel: Kernel, tensors: Sequence[Tensor], outs: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Tells autograd what was written: what it had saved of it is not what it was."""
        for i in kernel.written:
            _tell_written(tensors[i])
        for out in outs or ():
            _tell_written(out)
        return tensors


def _remade(fn: Callable[..., Any], autograd: bool, name: str, numerics: Numerics) -> Pointwise[..., Any]:
    return Pointwise(fn, autograd=autograd, name=name, numerics=numerics)


def _tell_written(tensor: Tensor) -> None:
    if not tensor.is_inference():  # of which autograd has saved nothing
        torch.autograd.graph.increment_version(tensor)


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(part, Tensor) for part in value)


def _place_in(args: tuple[Any, ...], kwargs: dict[str, Any], i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with what is at one place of the lists."""
    positional = tuple([value[i] if _is_list(value) else value for value in args])
    return positional, {key: value[i] if _is_list(value) else value for key, value in kwargs.items()}


class Gradient:
    """The kernel of a gradient, to be looked at: what it computes, and its source."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def source(self, *inputs: Tensor, target: Target = TRITON) -> KernelSource:
        """The kernel for such arguments and gradients of results."""
        return self._kernel.source(inputs, [], target)

    def traced(self, *inputs: Tensor) -> PointwiseGraph:
        """The graph for such arguments and gradients of results."""
        return self._kernel.variant(inputs, [], [False] * len(inputs), TRITON).traced


# What is wrong with a call, whatever the function does.
_OF_A_CALL = (
    *(AutogradError, DeviceError, SignatureError, TransformError, WriteError),
    *(CompilationError, CompilerMissingError),
)
_WITHOUT_TENSORS = "{} was called without tensors; a kernel needs one to take the shape from."
_WITHOUT_AUTOGRAD = (
    "a tensor that {} reads requires a gradient; make it with pointwise(..., autograd=True), or call it under "
    "torch.no_grad()."
)
_WRITES = (
    "{} writes to tensors in place, and one that it reads or writes requires a gradient, which could not flow through. "
    "Call it under torch.no_grad(), as an optimizer's step is, or return the new values."
)

_numbers = itertools.count(1)
_functions: weakref.WeakValueDictionary[int, Pointwise[..., Any]] = weakref.WeakValueDictionary()


@constant
def _prepared(
    handle: int, structure: Structure, kinds: tuple[tuple[torch.dtype, bool], ...], dims: int, device: str
) -> tuple[str, int, tuple[int, ...], Structure]:
    """The key of the kernel for a call; how many tensors it captures, which it writes, and what it returns."""
    function = _functions[handle]
    shapes = [(1,) * (0 if scalar else dims) for _, scalar in kinds]
    dtypes = [dtype for dtype, _ in kinds]
    pairs = zip(shapes, dtypes, strict=True)
    examples = [torch.empty(shape, dtype=dtype, device=_here(device)) for shape, dtype in pairs]
    kernel, captured = function._kernel(structure, examples, _samples(structure))
    function._captured[kernel.key] = captured
    return kernel.key, len(captured), kernel.written, kernel.result


def _here(device: str) -> str:
    """A device of this kind that tensors can be made on: "meta" for one that stands in for a GPU."""
    return device if device == "cpu" or (device == "cuda" and torch.cuda.is_available()) else "meta"


def _samples(structure: Structure) -> list[int | float]:
    """Numbers for a first run; the kernel's traces have those of the call."""
    kind = structure[0]
    if kind == "float":
        return [0.5]
    if kind == "int":
        return [3]
    if kind == "call":
        return [n for part in structure[1] for n in _samples(part)] + [n for _, p in structure[2] for n in _samples(p)]
    if kind in ("tuple", "list"):
        return [n for part in structure[1] for n in _samples(part)]
    if kind == "dict":
        return [n for _, part in structure[1] for n in _samples(part)]
    return []


class _Autograd(torch.autograd.Function):
    """The shortest road to gradients; `_pointwise_op` is the same for compilers and transforms."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, numbers: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[2:]
        results, variant = kernel.run(tensors, numbers, wanted)
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.differentiable = variant.traced.differentiable
        ctx.save_for_backward(*tensors)
        fixed = (result for result, flows in zip(results, ctx.differentiable, strict=True) if not flows)
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        given = [c for c, flows in zip(cotangents, ctx.differentiable, strict=True) if flows]
        if not given:
            return (None,) * (2 + len(tensors))
        gradient = ctx.kernel.gradient(wanted, ctx.differentiable)
        every = [*tensors, *given]
        if not is_plain(every):
            results = pointwise_op(every, ctx.numbers, [t.dim() == 0 for t in every], gradient.key)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in every):
            # Recorded, if gradients of gradients are wanted: it is such a kernel itself.
            results = _Autograd.apply(gradient, ctx.numbers, *every)
        else:
            results = gradient.run(every, ctx.numbers, [False] * len(every))[0]
        found = iter(results)
        return None, None, *(
            next(found).sum_to_size(t.shape).to(t.dtype) if want else None
            for t, want in zip(tensors, wanted, strict=True)
        )
