"""Loads a function that the command line names, creates arguments for it, and makes its kernels."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._calls import Parts, Structure, take_apart
from flexsn_codegen.functions._cutting import cut_of
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._plan import Trace
from flexsn_codegen.functions._pointwise import Pointwise
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import NothingCutError, TorchError


class UsageError(Exception):
    """The command line is malformed, or names something that does not exist."""


@dataclass(frozen=True, slots=True)
class ShownKernel:
    """A kernel, its graph as text, and the dtypes of its tensors."""

    graph: str
    source: KernelSource
    dtypes: tuple[torch.dtype, ...]


def kernels(
    path: str, arguments: Sequence[str] | None, numerics: Numerics, target: Target, *, gradient: bool
) -> tuple[list[ShownKernel], list[ShownKernel]]:
    """The kernels of the function ``"module:function"``. If `gradient` is True, also the kernels of its gradient.

    Raises:
        UsageError: see `load`.
    """
    shown = load(path, arguments, numerics, target, gradient=gradient)
    gradients = _describe(shown.backward, shown.gradient_inputs) if shown.backward else []
    return _describe(shown.trace, shown.tensors), gradients


@dataclass(frozen=True, slots=True)
class ShownFunction:
    """A function that the command line names, with its traces.

    Attributes:
        structure: structure of the call for which the function is traced.
        tensors: tensors of this call, followed by the captured tensors.
        numbers: numbers of this call.
        needs_gradient: for each tensor, True if its gradient is computed.
        gradient_inputs: the tensors that the kernels of the gradient receive.
    """

    fn: Callable[..., Any]
    kernel: Kernel
    structure: Structure
    tensors: list[Tensor]
    numbers: list[int | float]
    needs_gradient: list[bool]
    trace: Trace
    backward: Trace | None
    gradient_inputs: list[Tensor]


def load(
    path: str, arguments: Sequence[str] | None, numerics: Numerics, target: Target, *, gradient: bool
) -> ShownFunction:
    """The function ``"module:function"`` with its traces.

    Raises:
        UsageError: the function does not exist or has no gradient, or `examples` cannot create its arguments.
    """
    fn: Any = function(path)
    name = path.rpartition(":")[2]
    if isinstance(fn, Pointwise):
        fn, numerics, name = fn._fn, fn._numerics, fn.__name__
    values = examples(fn, arguments)
    structure, parts = take_apart(name, values, {})
    numbers = parts.numbers
    kernel = _trace_kernel(fn, name, structure, parts, numerics, gradient=gradient)
    tensors = [*parts.tensors, *(t.to("meta") for t in kernel.captured.tensors)]
    flags = [*(t.requires_grad for t in parts.tensors), *(t.requires_grad for t in kernel.captured.tensors)]
    requested = [gradient and flag for flag in flags]
    trace = kernel.variant(tensors, numbers, requested, target)
    if not gradient:
        return ShownFunction(fn, kernel, structure, tensors, numbers, requested, trace, None, [])
    flows = trace.graph.differentiable
    if not any(flows):
        raise UsageError(f"no result of {path} is differentiable.")
    results = trace.plan(tensors).results(tensors[0])
    gradient_inputs = [
        *(t.detach() for t in tensors),
        *(r for r, is_present in zip(results, flows, strict=False) if is_present),
    ]
    backward = kernel.gradient(requested, flows).variant(
        gradient_inputs, numbers, [False] * len(gradient_inputs), target
    )
    return ShownFunction(fn, kernel, structure, tensors, numbers, requested, trace, backward, gradient_inputs)


def _trace_kernel(
    fn: Callable[..., Any], name: str, structure: Structure, parts: Parts, numerics: Numerics, *, gradient: bool
) -> Kernel:
    def traced(kernel: Kernel) -> Kernel:
        tensors = [*parts.tensors, *(t.to("meta") for t in kernel.captured.tensors)]
        requested = [gradient and t.requires_grad for t in tensors]
        kernel.variant(tensors, parts.numbers, requested, TRITON)
        return kernel

    try:
        return traced(Kernel.of(fn, name, numerics, structure, parts.tensors, parts.numbers))
    except Exception as error:
        try:
            must_cut = not isinstance(error, TorchError)
            return traced(cut_of(fn, name, numerics, structure, parts.tensors, parts.numbers, must_cut=must_cut))
        except NothingCutError:
            raise error from None


def _describe(trace: Trace, inputs: Sequence[Tensor]) -> list[ShownKernel]:
    plan = trace.plan(inputs)
    dtypes = [*(t.dtype for t in inputs), *(memory.dtype for memory in plan.new)]
    return [
        ShownKernel(str(graph.graph), launch.built.source, tuple(dtypes[operand.tensor] for operand in launch.operands))
        for graph, launch in zip(trace.graphs, plan.launches, strict=True)
    ]


def function(path: str) -> Callable[..., Any]:
    """Imports the function ``"module:function"``. The module may also be in the working directory.

    Raises:
        UsageError: the function does not exist.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise UsageError(f"{path!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        result: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no module {error.name!r}") from None
    except SyntaxError as error:
        raise UsageError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    for part in name.split("."):
        if not hasattr(result, part):
            raise UsageError(f"{module_name!r} has no {name!r}")
        result = getattr(result, part)
    if not callable(result):
        raise UsageError(f"{path} is a {type(result).__name__}, not a function")
    loaded: Callable[..., Any] = result
    return loaded


def examples(fn: Callable[..., Any], descriptions: Sequence[str] | None) -> list[Tensor | int | float | bool]:
    """Creates tensors without data, and numbers, from descriptions such as ``float32:3x8`` and ``0.5``.

    If `descriptions` is `None`, each parameter without a default value receives a float32 tensor.

    Raises:
        UsageError: the number of arguments is unknown, or a description is malformed.
    """
    if descriptions is None:
        try:
            parameters = inspect.signature(getattr(fn, "forward", fn)).parameters.values()
        except (TypeError, ValueError):
            raise UsageError("the number of arguments is unknown: pass --arguments") from None
        needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if not needed or any(p.kind is p.VAR_POSITIONAL for p in needed):
            raise UsageError("the number of arguments is unknown: pass --arguments")
        descriptions = ["float32"] * len(needed)
    return [_parse_example(text) for text in descriptions]


def _parse_example(text: str) -> Tensor | int | float | bool:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    name, colon, dimensions = text.partition(":")
    dtype = getattr(torch, name, None)
    sizes = dimensions.split("x") if colon else ["8"]
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in sizes):
        raise UsageError(
            f"{text!r} is not an argument; valid ones are float32, int64, float32:0, float32:3x8, 0.5, 3, True"
        )
    shape = tuple(map(int, sizes))
    shape = () if math.prod(shape) == 0 else shape
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
