"""From a function of single elements, written on tensors, to the graph that a kernel is generated from.

The function is recorded on stand-ins without data. All have one shape, the arguments of no dimension
excepted (they promote by other rules), so whatever is not element by element shows as a change of shape.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from flexsn_codegen._clean import cleaned
from flexsn_codegen._core import CoreSource, emit_core, location_text
from flexsn_codegen._decompositions import DECOMPOSITIONS
from flexsn_codegen._numerics import Numerics
from flexsn_codegen._torch_private import (
    TORCH_FOLDER,
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    lower,
    record,
    set_stack_trace,
    undisturbed,
)
from flexsn_codegen.errors import TraceError, UnsupportedOpError

Function = Callable[..., Any]

# Two shapes: where the result depends on the sizes, the two graphs differ.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (10007, 10009, 10037, 29, 31, 37, 41, 43))
MAX_DIMENSIONS = len(_SIZES[0])


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """What a kernel depends on, of an argument.

    Attributes:
        dtype: of its elements.
        scalar: it has no dimensions, and others have some.
        requires_grad: autograd follows what is computed from it.
    """

    dtype: torch.dtype
    scalar: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as the source of its core.

    Attributes:
        graph: `[*arguments] -> [*results]`, on prims and numbers.
        core: takes the arguments that it uses, named ``input_0`` and so on.
        dtypes: of the results.
        differentiable: for each result, whether a gradient can flow through it.
        single: the function returns a tensor, not a tuple of tensors.
    """

    graph: fx.Graph
    core: CoreSource
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    single: bool


def trace(
    fn: Function,
    arguments: Sequence[ArgumentType],
    dimensions: int,
    device: torch.device,
    name: str,
    numerics: Numerics,
) -> Traced:
    """`fn` for one kind of arguments.

    Raises:
        TraceError: `fn` does not return tensors of its arguments' common shape, captures a tensor, or
            computes with sizes.
        UnsupportedOpError: an op has no rule.
    """
    with undisturbed():
        first, second = (_trace(fn, arguments, sizes[:dimensions], device, name, numerics) for sizes in _SIZES)
    if first.core.name != second.core.name:
        raise TraceError(
            f"{name} computes something else for other sizes of its arguments (it reads a shape). "
            "Pass what it computes from them as an argument."
        )
    return first


def gradient_of(
    fn: Function, arguments: Sequence[ArgumentType], differentiable: Sequence[bool], wanted: Sequence[bool]
) -> Function:
    """The function `(*arguments, *gradients of the differentiable results) -> (*wanted gradients)`.

    It computes the results again instead of keeping them. It has a gradient itself.
    """

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        primals, cotangents = values[: len(arguments)], values[len(arguments) :]
        shape = cotangents[0].shape
        again = any(v.requires_grad for v in values)
        with torch.enable_grad():
            # Leaves, but for those that a second gradient flows through.
            leaves = [
                v.detach().requires_grad_() if want and not v.requires_grad else v
                for v, want in zip(primals, wanted, strict=True)
            ]
            results = _as_tuple(fn(*leaves))
            roots = [r.expand(shape) for r, there in zip(results, differentiable, strict=True) if there]
            asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
            found = torch.autograd.grad(roots, asked, cotangents, allow_unused=True, create_graph=again)
        return tuple(
            (torch.zeros_like(leaf) if g is None else g).expand(shape) for g, leaf in zip(found, asked, strict=True)
        )

    return gradient


def _trace(
    fn: Function,
    arguments: Sequence[ArgumentType],
    sizes: Sequence[int],
    device: torch.device,
    name: str,
    numerics: Numerics,
) -> Traced:
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        stand_ins = [torch.empty(() if a.scalar else sizes, dtype=a.dtype, device=device) for a in arguments]
    differentiable: list[bool] = []
    single = False

    def run(*values: Tensor) -> list[Tensor]:
        nonlocal single
        leaves = [v.clone().requires_grad_(a.requires_grad) for v, a in zip(values, arguments, strict=True)]
        versions = [leaf._version for leaf in leaves]
        with torch.enable_grad(), _Locations():  # type: ignore[no-untyped-call]
            returned = fn(*leaves)
        if versions != [leaf._version for leaf in leaves]:
            raise TraceError(f"{name} changes its argument in place. Return the new value instead.")
        single = isinstance(returned, Tensor)
        results = _as_tuple(returned)
        for result in results:
            if not isinstance(result, Tensor) or tuple(result.shape) not in (tuple(sizes), ()):
                raise TraceError(
                    f"{name} returned {_described(result)} for arguments of shape {list(sizes)}: each result "
                    "is a tensor of the arguments' common shape, computed element by element."
                )
        differentiable.extend(r.requires_grad for r in results)
        return [r.detach() for r in results]

    try:
        recorded = record(run, stand_ins, mode, DECOMPOSITIONS)
        lowered = lower(recorded, stand_ins, mode, DECOMPOSITIONS)
    except AssertionError as error:
        if "Please convert all Tensors" not in str(error):
            raise
        raise TraceError(
            f"{name} captures a tensor (a closure, a global or a module's parameter), which would be frozen "
            "in the kernel. Pass it as an argument."
        ) from None
    except DataDependentOutputException as error:
        raise TraceError(
            f"{name} needs the value of a tensor while it is traced ({error.func}): `.item()`, or an `if` or "
            "loop on it. Use torch.where."
        ) from None
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise TraceError(f"{name} changes its argument in place. Return the new value instead.") from None
    _refuse_complex(recorded.graph)
    graph = cleaned(lowered, name)
    core = emit_core(graph, name, prune=True, precision=numerics.precision, fast_math=numerics.fast_math)
    results = [n.meta["val"] for n in _output(graph)]
    return Traced(graph, core, tuple(r.dtype for r in results), tuple(differentiable), single)


def _refuse_complex(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            raise UnsupportedOpError(
                f"{node.target} returns {value.dtype}: Triton has no complex numbers{location_text(node)}",
                str(node.target),
            )


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(type(value).__name__)


def _output(graph: fx.Graph) -> Sequence[fx.Node]:
    results: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return cast(Sequence[fx.Node], results)


class _Locations(TorchDispatchMode):
    """Notes for each op the line that called it: the innermost one that is not torch's or ours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        set_stack_trace(_user_line())
        return func(*args, **(kwargs or {}))


_OURS = str(Path(__file__).parent)


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            break  # an op that autograd calls: beyond is the caller of the kernel
        if not file.startswith((TORCH_FOLDER, "<")):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f'  File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {code}\n'
        frame = frame.f_back  # type: ignore[assignment]
    return ""
