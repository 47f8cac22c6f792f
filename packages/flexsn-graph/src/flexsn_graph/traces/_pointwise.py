"""Traces an elementwise function of tensors, and its gradients.

All arguments that have dimensions are recorded with one shape. Arguments without dimensions are recorded without
dimensions, because different promotion rules apply to them. The gradient of such an argument is a sum over the
elements. A kernel returns the terms of the sum, and the terms are summed afterwards. Therefore, the op `terms` is
applied to the gradient and undoes the sum. In a second derivative, the gradient that arrives at `terms` repeats one
number for all terms. The op `uniform` returns this number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._location import user_location
from flexsn_graph._torch_private import FakeTensorMode, undisturbed
from flexsn_graph.errors import TorchError, TraceError
from flexsn_graph.ir._ops import TERMS, UNIFORM
from flexsn_graph.ir._ports import Role, ports
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.lowering._normalize import normalize
from flexsn_graph.reads import Reads
from flexsn_graph.tracing._captures import Captures
from flexsn_graph.tracing._core import unwrap_compiled
from flexsn_graph.tracing._substitute import Effects, effects_of
from flexsn_graph.tracing._tracer import Tracer, explained

# Two shapes are traced. If the result depends on the sizes, the two graphs differ.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (10007, 10009, 10037, 29, 31, 37, 41, 43))
MAX_DIMENSIONS = len(_SIZES[0])


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """Properties of an argument on which the graph depends.

    Attributes:
        dtype: dtype of the argument.
        scalar: True if the argument has no dimensions, but other arguments have dimensions.
        requires_grad: True if autograd follows the argument.
    """

    dtype: torch.dtype
    scalar: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class PointwiseGraph:
    """The graph of an elementwise function.

    Attributes:
        step: the graph of the function, from inputs to outputs, on tensors of one shape.
        dtypes: dtypes of the results.
        differentiable: for each result, True if a gradient can flow through it.
        single: True if the function returns a tensor, not a tuple of tensors.
    """

    step: StepGraph
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    single: bool


def trace_pointwise(
    fn: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    dimensions: int,
    device: torch.device,
    name: str,
    *,
    gradient: bool = False,
    reads: Reads | None = None,
) -> PointwiseGraph:
    """Traces `fn` for arguments of these types.

    Args:
        fn: a function of tensors that have one shape or no dimensions. `fn` returns a tensor or a tuple of tensors,
            each of this shape or without dimensions.
        dimensions: number of dimensions of the arguments that are not scalars, at most `MAX_DIMENSIONS`.
        name: name of the function, for messages.
        gradient: True if `gradient_of` created `fn`.
        reads: records the values that `fn` reads in this trace in addition to its arguments.

    Raises:
        TraceError: `fn` returns anything except tensors of its arguments' common shape and tensors without dimensions,
            captures a tensor, or depends on sizes.
        UnsupportedOpError: `fn` does something that a kernel cannot do. The message names the op and the line.
    """
    fn = unwrap_compiled(fn)
    with undisturbed():
        try:
            first, second = (_trace(fn, arguments, s[:dimensions], device, name, gradient, reads) for s in _SIZES)
        except TorchError as error:
            raise _make_shape_error(name, dimensions, error) from error
    if str(first.step.graph) != str(second.step.graph):
        raise TraceError(
            f"the result of {name} depends on the sizes of its arguments, because {name} reads a shape. "
            "Pass values that are computed from sizes as arguments."
        )
    return first


def pointwise_effects(
    fn: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    dimensions: int,
    device: torch.device,
    name: str,
    reads: Reads | None = None,
    captured: dict[int, Tensor] | None = None,
) -> Effects:
    """Finds the values that a function captures, changes and returns. For the other arguments, see `trace_pointwise`.

    Args:
        reads: records the other values that the function reads.
        captured: receives the captured tensors by id, even if the function fails later.

    Raises:
        TorchError: torch raised an error when it ran the function.
        UnsupportedOpError: the function needs the values of tensors.
    """
    sizes = _SIZES[0][:dimensions]
    examples = _make_examples(arguments, sizes, device)
    with undisturbed():
        try:
            with explained():
                return effects_of(unwrap_compiled(fn), examples, sizes, reads, captured)
        except TorchError as error:
            raise _make_shape_error(name, dimensions, error) from error


def _make_examples(arguments: Sequence[ArgumentType], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    # One element in memory is enough for any shape, because the tracer uses only shape, dtype and device.
    elements = [torch.empty((), dtype=a.dtype, device=device) for a in arguments]
    return [e if a.scalar else e.expand(tuple(sizes)) for e, a in zip(elements, arguments, strict=True)]


def _make_shape_error(name: str, dimensions: int, error: TorchError) -> TorchError:
    shape = list(_SIZES[0][:dimensions])
    return TorchError(f"{name} was traced on tensors of other shapes than its arguments have, such as {shape}: {error}")


def gradient_of(
    fn: Callable[..., Any], num_arguments: int, differentiable: Sequence[bool], wanted: Sequence[bool]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function `(*arguments, *gradients of the differentiable results) -> (*requested gradients)`.

    The returned function recomputes the results of `fn` instead of reading saved results, and can be differentiated
    again. For an argument without dimensions, the returned function returns the terms of the gradient.
    """

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        primals, cotangents = values[:num_arguments], values[num_arguments:]
        shape = cotangents[0].shape
        is_differentiated = any(v.requires_grad for v in values)
        with torch.enable_grad():
            # Values with a requested gradient become new leaves, unless a second gradient flows through them.
            leaves = [
                v.detach().requires_grad_() if is_requested and not v.requires_grad else v
                for v, is_requested in zip(primals, wanted, strict=True)
            ]
            results = _as_tuple(fn(*leaves))
            roots = [r.expand(shape) for r, flows in zip(results, differentiable, strict=True) if flows]
            requested = [leaf for leaf, is_requested in zip(leaves, wanted, strict=True) if is_requested]
            gradients = torch.autograd.grad(
                roots, requested, cotangents, allow_unused=True, create_graph=is_differentiated
            )
            return tuple(
                torch.zeros_like(leaf).expand(shape) if g is None else _to_terms(g, shape)
                for g, leaf in zip(gradients, requested, strict=True)
            )

    return gradient


def _to_terms(gradient: Tensor, shape: torch.Size) -> Tensor:
    if gradient.shape == shape:
        return gradient
    terms: Tensor = _Terms.apply(gradient, shape)
    return terms


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, shape: Sequence[int]) -> Tensor:
        terms: Tensor = TERMS(total, shape)
        return terms

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Uniform.apply(gradient), None


class _Uniform(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor) -> Tensor:
        ctx.shape = terms.shape
        number: Tensor = UNIFORM(terms)
        return number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _to_terms(gradient, ctx.shape)


def _trace(
    fn: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    sizes: Sequence[int],
    device: torch.device,
    name: str,
    gradient: bool,
    reads: Reads | None,
) -> PointwiseGraph:
    single = False

    def as_results(returned: Any) -> tuple[Tensor, ...]:
        nonlocal single
        single = isinstance(returned, Tensor)
        results = _as_tuple(returned)
        for result in results:
            if not isinstance(result, Tensor) or tuple(result.shape) not in (tuple(sizes), ()):
                raise TraceError(
                    f"{name} returned {_describe(result)} for arguments of shape {list(sizes)}: each result "
                    "has to be a tensor of the arguments' common shape, computed element by element."
                )
        return tuple(result.expand(tuple(sizes)) for result in results)

    examples = _make_examples(arguments, sizes, device)
    requires_grad = [a.requires_grad for a in arguments]
    tracer = Tracer(fn, examples, as_results, requires_grad, captures=partial(_NoCaptures, name), reads=reads)
    lowered, _ = tracer.lower(tracer.record_forward(), sizes, sums_allowed=gradient)
    inputs = ports(Role.INPUT, len(arguments))
    graph = normalize(lowered, [port.name for port in inputs])
    step = StepGraph(graph, inputs, ports(Role.OUTPUT, len(tracer.results)), {})
    dtypes = tuple(node.meta["val"].dtype for node in step.entries)
    return PointwiseGraph(step, dtypes, tracer.differentiable, single)


class _NoCaptures(Captures):
    """Refuses captured tensors."""

    def __init__(self, name: str, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self._name = name

    def add(self, tensor: Tensor) -> int:
        raise TraceError(
            f"{self._name} captures a tensor (a closure, a global or a module's parameter), which would be frozen "
            f"in the kernel. Pass it as an argument.\n  at {user_location()}"
        )


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def _describe(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a value of type {type(value).__name__}"
    )
