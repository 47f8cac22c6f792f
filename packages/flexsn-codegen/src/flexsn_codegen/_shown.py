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

from flexsn_codegen.functions._cutting import cut_of
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._plan import Trace
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import NothingCutError


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
    kernel, wanted = _kernel(fn, name, inputs, numerics, gradient=gradient)
    trace = kernel.variant(inputs, (), wanted, target)
    shown = _shown(trace, inputs)
    if not gradient:
        return shown, []
    if not any(trace.graph.differentiable):
        raise UsageError(f"no result of {path} is differentiable.")
    results = trace.plan(inputs).results(inputs[0])
    cotangents = [r for r, flows in zip(results, trace.graph.differentiable, strict=False) if flows]
    given = [*(t.detach() for t in inputs), *cotangents]
    backward = kernel.gradient(wanted, trace.graph.differentiable)
    return shown, _shown(backward.variant(given, (), [False] * len(given), target), given)


def _kernel(
    fn: Callable[..., Any], name: str, inputs: Sequence[Tensor], numerics: Numerics, *, gradient: bool
) -> tuple[Kernel, list[bool]]:
    """The function's kernel, and which of its tensors a gradient is shown of."""
    structure = ("call", (("tensor",),) * len(inputs), ())
    wanted = [gradient and t.requires_grad for t in inputs]
    try:
        kernel = Kernel.of(fn, name, numerics, structure, inputs, ())
        kernel.variant(inputs, (), wanted, TRITON)
    except Exception as error:
        kernel = cut_of(fn, name, numerics, structure, inputs, ())
        try:
            kernel.variant(inputs, (), wanted, TRITON)
        except NothingCutError:
            raise error from None
    return kernel, wanted


def _shown(trace: Trace, inputs: Sequence[Tensor]) -> list[ShownKernel]:
    plan = trace.plan(inputs)
    dtypes = [*(t.dtype for t in inputs), *(memory.dtype for memory in plan.new)]
    return [
        ShownKernel(str(step.graph), launch.built.source, tuple(dtypes[operand.tensor] for operand in launch.operands))
        for step, launch in zip(trace.graphs, plan.launches, strict=True)
    ]


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
