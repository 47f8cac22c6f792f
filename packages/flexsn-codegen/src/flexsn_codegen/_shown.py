"""What the command line is given and looks at: a function by its name, its arguments, its kernels."""

from __future__ import annotations

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

from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._cut import CutFunction
from flexsn_codegen.functions._pointwise import Gradient, Pointwise
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets import Target
from flexsn_graph import CellGraph, NothingCutError, Role


class UsageError(Exception):
    """What was asked for does not exist."""


@dataclass(frozen=True, slots=True)
class ShownKernel:
    """A kernel, its graph as text, and the dtypes of its tensors."""

    graph: str
    source: KernelSource
    dtypes: tuple[torch.dtype, ...]


def kernels(
    path: str, arguments: Sequence[str] | None, numerics: Numerics, target: Target, *, gradient: bool
) -> tuple[list[ShownKernel], list[ShownKernel]]:
    """The kernels of the function ``"module:function"``, and those of its gradient, if it is wanted.

    Raises:
        UsageError: there is no such function, or no gradient.
    """
    fn = function(path)
    inputs = examples(fn, arguments)
    name = path.rpartition(":")[2]
    whole: Pointwise[..., object] = Pointwise(fn, autograd=gradient, name=name, numerics=numerics)
    try:
        shown = [_of_whole(whole, inputs, target)]
    except Exception as error:
        cut = CutFunction(lambda notes: fn, name, numerics, Captured(fn, name))
        return _of_pieces(cut, inputs, target, error, gradient=gradient)
    if not gradient:
        return shown, []
    built = whole.traced(*inputs)
    if not any(built.differentiable):
        raise UsageError(f"no result of {path} is differentiable.")
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    given = [t.detach() for t in inputs]
    pairs = zip(built.dtypes, built.differentiable, strict=True)
    given += [torch.empty(shape, device="meta", dtype=dtype) for dtype, there in pairs if there]
    flags = tuple(t.requires_grad for t in inputs)
    return shown, [_of_whole(whole.gradient(inputs, flags), given, target)]


def _of_whole(kernel: Pointwise[..., object] | Gradient, inputs: Sequence[Tensor], target: Target) -> ShownKernel:
    traced, source = kernel.traced(*inputs), kernel.source(*inputs, target=target)
    of_result = iter(traced.dtypes)
    dtypes = [inputs[p.index].dtype if p.role is Role.INPUT else next(of_result) for p in source.params]
    return ShownKernel(str(traced.step.graph), source, tuple(dtypes))


def _of_pieces(
    cut: CutFunction, inputs: Sequence[Tensor], target: Target, error: Exception, *, gradient: bool
) -> tuple[list[ShownKernel], list[ShownKernel]]:
    wanted = tuple(gradient and t.requires_grad for t in inputs)
    try:
        trace = cut.trace(inputs, (), wanted, target)
    except NothingCutError:
        raise error from None
    graph = trace.graph
    shown = _pieces(graph, cut.sources(*inputs, target=target), inputs)
    if not gradient:
        return shown, []
    if not any(graph.differentiable):
        raise UsageError("no result is differentiable.")
    results = []
    for result, dtype, there in zip(graph.results, graph.dtypes, graph.differentiable, strict=True):
        if there:
            shape = result.shape(graph.steps[result.step].shape(inputs))
            results.append(torch.empty(shape, dtype=dtype, device="meta"))
    given = [*(t.detach() for t in inputs), *results]
    backward = cut.gradient(wanted, graph.differentiable)
    traced = backward.trace(given, (), (False,) * len(given), target)
    return shown, _pieces(traced.graph, backward.sources(*given, target=target), given)


def _pieces(graph: CellGraph, sources: Sequence[KernelSource], inputs: Sequence[Tensor]) -> list[ShownKernel]:
    found = []
    for step, source in zip(graph.steps, sources, strict=True):
        dtypes = [
            inputs[step.inputs[p.index].tensor].dtype if p.role is Role.INPUT else step.dtypes[p.index]
            for p in source.params
        ]
        found.append(ShownKernel(str(step.step.graph), source, tuple(dtypes)))
    return found


def function(path: str) -> Callable[..., Any]:
    """The function ``"module:function"``, of the working directory, too.

    Raises:
        UsageError: there is none.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise UsageError(f"{path!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no module {error.name!r}") from None
    except SyntaxError as error:
        raise UsageError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{path} is a {type(found).__name__}, not a function")
    made: Callable[..., Any] = found
    return made


def examples(fn: Callable[..., Any], given: Sequence[str] | None) -> list[Tensor]:
    """Tensors without data, by their descriptions; by default, one of float32 for each argument.

    Raises:
        UsageError: their number is not known, or one is described otherwise than as ``float32:3x8``.
    """
    if given is None:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            raise UsageError("the number of arguments is not known: give --arguments") from None
        needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if not needed or any(p.kind is p.VAR_POSITIONAL for p in needed):
            raise UsageError("the number of arguments is not known: give --arguments")
        given = ["float32"] * len(needed)
    return [_example(text) for text in given]


def _example(text: str) -> Tensor:
    name, colon, dimensions = text.partition(":")
    dtype = getattr(torch, name, None)
    sizes = dimensions.split("x") if colon else ["8"]
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in sizes):
        raise UsageError(f"{text!r} is no argument: float32, bfloat16, int64, float32:0, float32:3x8 are")
    shape = tuple(map(int, sizes))
    shape = () if math.prod(shape) == 0 else shape
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
