"""Turns any function of single elements into one kernel that reads the arguments once and writes the results once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload

import torch
from torch import Tensor, fx

from flexsn_codegen._torch_private_modes import is_forward_mode, is_plain
from flexsn_codegen.errors import OF_A_CALL, AutogradError, SignatureError, TransformError
from flexsn_codegen.functions._calls import take_apart, take_lists_apart
from flexsn_codegen.functions._checks import check_tensors, make_no_tensors_error, outs_of
from flexsn_codegen.functions._foreach import OverLists
from flexsn_codegen.functions._foreach_op import lists_by_operator
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._kernels import Kernels
from flexsn_codegen.functions._launch import addresses_of
from flexsn_codegen.functions._plan import Trace
from flexsn_codegen.functions._prepared import NOT_PREPARED, Launches, PreparedCalls
from flexsn_codegen.functions._recorded import by_operator
from flexsn_codegen.functions._run import run
from flexsn_codegen.source._numerics import Numerics, Precision
from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import PointwiseGraph

P = ParamSpec("P")
R = TypeVar("R")


@overload
def pointwise(
    fn: fx.Graph,
    *,
    autograd: bool = True,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Pointwise[..., Tensor | tuple[Tensor, ...]]: ...


@overload
def pointwise(
    fn: Callable[P, R],
    *,
    autograd: bool = True,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Pointwise[P, R]: ...


@overload
def pointwise(
    fn: None = None,
    *,
    autograd: bool = True,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> Callable[[Callable[P, R]], Pointwise[P, R]]: ...


def pointwise(
    fn: Callable[..., object] | fx.Graph | None = None,
    *,
    autograd: bool = True,
    name: str | None = None,
    precision: Precision = "eager",
    fast_math: bool = False,
) -> object:
    """Makes one kernel of a function that works element by element.

    Args:
        fn: a function, a method, a module or an `fx.Graph`. If `None`, `pointwise` returns a decorator. The function is
            written for tensors of one common shape, may use any torch op that works element by element, and returns a
            tensor, or tuples, lists and dicts of tensors. Tensors without dimensions promote as in eager mode. If the
            function writes to an argument in place, the same kernel writes to the caller's tensor. Such a function
            may return nothing. Captured tensors, such as a module's parameters or the tensors of a closure, are read
            again at each call, and receive gradients.
        autograd: True to compute gradients if an argument requires one, including gradients of gradients. Each backward
            has one kernel, which recomputes the values that it needs from the arguments. If False, a call with an
            argument that requires a gradient raises an error outside of `torch.no_grad()`.
        name: the kernel's name. By default, the function's name.
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` computes in float32 and rounds only results and gradients.
        fast_math: True to use approximate division, `sqrt`, `exp`, `exp2`, `tanh` and `pow` in float32, and fused
            multiply-add. Denormals may be treated as zero.

    Returns:
        A `Pointwise`, which is called like `fn`: on tensors on one device, with any strides and any shapes that
        broadcast, and on Python numbers, which are arguments of the kernel. Each result has the shape to which all
        arguments broadcast, unless `fn` cuts dimensions into pieces, joins pieces or reduces rows.

    Raises:
        PrecisionError: `precision` is unknown.
        UnsupportedOpError: on the first call: an op is not pointwise or has no rule. The message names the op and the
            line.
        TraceError: on the first call: `fn` computes with shapes, or returns something other than tensors.
        ArgumentError, DeviceError, AutogradError, WriteError: on any call. See the descriptions of these classes.

    Example:
        >>> swiglu = pointwise(lambda x, gate, limit: (x * torch.nn.functional.silu(gate)).clamp(max=limit))
        >>> y = swiglu(torch.randn(8, 64), torch.randn(64), 6.0)
        >>> @pointwise(fast_math=True)
        ... def softplus(x, beta=1.0):
        ...     return torch.log1p(torch.exp(beta * x)) / beta
    """
    numerics = Numerics(precision, fast_math)
    if fn is None:
        return functools.partial(Pointwise, autograd=autograd, name=name, numerics=numerics)
    return Pointwise(cast(Any, fn), autograd=autograd, name=name, numerics=numerics)


class Pointwise(Generic[P, R]):
    """A function that runs as one kernel.

    One trace is valid for one kind of arguments (dtypes, number of dimensions), for all sizes and numbers. The object
    has the function's `__name__`, `__qualname__`, `__module__`, `__doc__` and `__wrapped__`. In a class, the object
    acts as a method. Each instance has a separate kernel, which reads the attributes of the instance in the same way as
    the kernel of a module reads the module's attributes.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R]

    def __init__(self, fn: Callable[P, R] | fx.Graph, *, autograd: bool, name: str | None, numerics: Numerics) -> None:
        self._fn: Callable[..., Any] = fx.GraphModule({}, fn) if isinstance(fn, fx.Graph) else fn
        self._autograd = autograd
        self._numerics = numerics
        self._name: str = name or getattr(fn, "__name__", None) or type(fn).__name__
        self._kernels = Kernels(self._fn, self._name, numerics, autograd=autograd)
        self._over_lists = OverLists(self._kernels)
        self._prepared = PreparedCalls()
        functools.update_wrapper(self, self._fn, updated=())
        self.__name__ = self._name
        self._instance: tuple[Any, str] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel and returns the function's return value."""
        if not torch.compiler.is_dynamo_compiling():
            return cast(R, self._call(args, kwargs, None))
        structure, parts = take_apart(self._name, args, kwargs)
        return cast(R, by_operator(self._kernels, structure, parts))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles a method as an attribute of its instance, and a function by its qualified name in its module.

        If this name does not lead to this object, the function itself is pickled, and is compiled again after loading.
        """
        if self._instance is not None:
            return getattr, self._instance
        qualname = getattr(self, "__qualname__", "")
        entry: Any = sys.modules.get(self.__module__)
        for part in qualname.split("."):
            entry = getattr(entry, part, None)
        return qualname if entry is self else (_rebuild, (self._fn, self._autograd, self._name, self._numerics))

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Pointwise[..., R]: ...

    def __get__(self, instance: object | None, owner: type) -> Pointwise[..., R]:
        """Binds a method: makes the `Pointwise` of one instance, and stores it in the instance."""
        if instance is None or not hasattr(self, "_attribute") or not hasattr(self._fn, "__get__"):
            return self
        attributes = getattr(instance, "__dict__", None)
        if attributes is None:
            raise SignatureError(
                f"{owner.__qualname__} has __slots__ but no __dict__, in which {self._name} could store the kernels of "
                "an instance. Add a slot '__dict__', or write a function that takes the tensors."
            )
        bound = Pointwise(
            self._fn.__get__(instance, owner), autograd=self._autograd, name=self._name, numerics=self._numerics
        )
        bound._instance = (instance, self._attribute)
        attributes[self._attribute] = bound  # Python finds this entry first, and does not call `__get__` again
        return bound

    def into(self, out: Tensor | Sequence[Tensor], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel and writes its results to existing tensors, like the ``out=`` of torch's functions.

        In compiled code, the results are copied to these tensors.

        Args:
            out: a tensor for each result, with the result's shape and dtype, and with any strides. These tensors may
                also be arguments.

        Raises:
            ArgumentError: `out` contains objects that are not tensors, or a tensor with a shape, dtype or device other
                than that of its result.
            WriteError: a tensor of `out` has several elements at one address, or overlaps with a different argument.
            AutogradError: a tensor of `out`, or an argument, requires a gradient outside of `torch.no_grad()`.
            TransformError: the call is inside of a transform or a dispatch mode.
        """
        outs = outs_of(self._name, out)
        if not torch.compiler.is_dynamo_compiling():
            return cast(R, self._call(args, kwargs, outs))
        structure, parts = take_apart(self._name, args, kwargs)
        return cast(R, by_operator(self._kernels, structure, parts, outs))

    def repeated_into(self, out: Sequence[Tensor], /, *args: Tensor) -> Launches:
        """Runs `into`, and returns a function that repeats the call with fewer checks.

        This method is for callers that allocate the tensors themselves. The tensors are not checked again, and captured
        values are not read again.

        Returns:
            A function of `(out, args)`. The tensors must have the same shapes, strides, dtypes and device as those of
            this call. The function must not be called if gradients are required, or inside of transforms, modes or
            compilers.

        Raises:
            The errors of `into`.
        """

        def by_into(out: Sequence[Tensor], args: Sequence[Tensor]) -> None:
            cast(Any, self).into(out, *args)

        by_into(out, args)
        if torch.compiler.is_dynamo_compiling():
            return by_into
        structure, parts = take_apart(self._name, args, {})
        return self._prepared.repeated(structure, parts.tensors, list(out)) or by_into

    def foreach(self, *args: Any, **kwargs: Any) -> list[R]:
        """Calls the function once for each index of some lists, as an optimizer's step does for each parameter.

        On a GPU, calls on dense tensors of the same dtypes and alignments share one launch. Each call with strided
        tensors has a separate launch. On the CPU, launches run one after the other.

        Args:
            args, kwargs: the arguments of the function. A list or a tuple of tensors may replace a tensor. All lists
                have the same length. An argument that is not a list (a number, a flag, a single tensor) is the same in
                each call.

        Returns:
            The function's return value for each index.

        Raises:
            ArgumentError: the lists have different lengths, or no argument is a list.
            AutogradError: a tensor requires a gradient. Call `foreach` under `torch.no_grad()`.
            Other errors: as in a call of the function.
        """
        lists = take_lists_apart(self._name, args, kwargs)
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling:
            result = lists_by_operator(self._kernels, lists)
            if result is not None:
                return cast(list[R], result)
        if compiling or is_forward_mode() or not is_plain(lists.tensors):
            calls = [lists.parts(i) for i in range(lists.count)]
            return [cast(R, by_operator(self._kernels, lists.structure, call)) for call in calls]
        return cast(list[R], self._over_lists(lists))

    def source(self, *args: Any, target: Target = TRITON, **kwargs: Any) -> KernelSource:
        """The kernel for arguments like these: its name, source and parameters. Meta tensors are accepted.

        Args:
            target: language of the kernel: `TRITON` or `targets.cpp.CPP`, regardless of the tensors' device.
        """
        try:
            kernel, tensors, numbers = self._find_kernel(args, kwargs)
            return kernel.sources(tensors, numbers, target)[0]
        except OF_A_CALL:
            raise
        except Exception as error:
            structure, parts = take_apart(self._name, args, kwargs)
            if not parts.tensors:
                raise
            cut, captured = self._kernels.cut_after(error, structure, parts.tensors, parts.numbers, target)
        return cut.sources([*parts.tensors, *captured], parts.numbers, target)[0]

    def traced(self, *args: Any, **kwargs: Any) -> PointwiseGraph:
        """The graph for arguments like these."""
        kernel, tensors, numbers = self._find_kernel(args, kwargs)
        requested = [self._autograd and t.requires_grad for t in tensors]
        return _get_graph(kernel.variant(tensors, numbers, requested, TRITON))

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        """The kernel `(*arguments, *gradients of the differentiable results) -> (*requested gradients)`.

        Args:
            inputs: the arguments of a call, for a function of tensors only.
            wanted: for each argument, True if its gradient is requested.
        """
        kernel, tensors, numbers = self._find_kernel(tuple(inputs), {})
        flags = [*wanted, *(t.requires_grad for t in kernel.captured.tensors)]
        traced = kernel.variant(tensors, numbers, flags, TRITON).graph
        if not any(traced.differentiable):
            raise AutogradError(f"no result of {self._name} is differentiable with respect to the requested arguments.")
        return Gradient(kernel.gradient(flags, traced.differentiable))

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor] | None) -> Any:
        structure, parts = take_apart(self._name, args, kwargs)
        plain = is_plain(parts.tensors if outs is None else [*parts.tensors, *outs])
        if plain:
            try:
                result = self._prepared.call(structure, parts, outs)
            except RuntimeError:
                check_tensors(self._name, parts.tensors)  # raises an error for nested tensors, which have no sizes
                raise
            if result is not NOT_PREPARED:
                return result
        check_tensors(self._name, parts.tensors)
        if not plain:
            if outs is not None:
                raise TransformError(
                    f"{self._name}.into cannot be recorded or transformed. Call {self._name}, and copy its results."
                )
            return by_operator(self._kernels, structure, parts)
        addresses_of([*parts.tensors, *(outs or ())])  # raises an error for tensors without memory before they are used
        return run(self._kernels, structure, parts, outs, self._prepared)

    def _find_kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kernel, list[Tensor], list[Any]]:
        structure, parts = take_apart(self._name, args, kwargs)
        kernel, captured = self._kernels.find(structure, parts.tensors, parts.numbers)
        tensors = [*parts.tensors, *captured]
        if not tensors:
            raise make_no_tensors_error(self._name)
        return kernel, tensors, parts.numbers


def _rebuild(fn: Callable[..., Any], autograd: bool, name: str, numerics: Numerics) -> Pointwise[..., Any]:
    return Pointwise(fn, autograd=autograd, name=name, numerics=numerics)


def _get_graph(trace: Trace) -> PointwiseGraph:
    assert isinstance(trace.graph, PointwiseGraph)
    return trace.graph


class Gradient:
    """The kernel of a gradient, for inspection: its graph and its source."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def source(self, *inputs: Tensor, target: Target = TRITON) -> KernelSource:
        """The kernel for arguments and gradients of results like these."""
        return self._kernel.sources(inputs, [], target)[0]

    def traced(self, *inputs: Tensor) -> PointwiseGraph:
        """The graph for arguments and gradients of results like these."""
        return _get_graph(self._kernel.variant(inputs, [], [False] * len(inputs), TRITON))
