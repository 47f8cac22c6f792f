"""`python -m flexsn_codegen`: what becomes of a function, without a GPU; and the cache's upkeep."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._cache import cache_folder, prune_cache
from flexsn_codegen._numerics import Numerics
from flexsn_codegen._pointwise import Gradient, Pointwise
from flexsn_codegen.errors import PrecisionError
from flexsn_codegen.targets.triton import OfflineJob, compile_offline
from flexsn_graph import Role

_OURS = os.path.dirname(__file__)


class _UsageError(Exception):
    """What was asked for does not exist."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if there is no kernel, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m flexsn_codegen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="prints a function's graph, its kernel and what that uses of a GPU")
    show.add_argument("function", metavar="module:function")
    show.add_argument(
        "--arguments",
        nargs="+",
        metavar="DTYPE[:0]",
        help="dtype of each argument, with :0 for one without dimensions; by default float32, all of them",
    )
    show.add_argument("--gradient", action="store_true", help="also the kernel of the gradient")
    show.add_argument("--precision", default="eager", help="eager (default) or float32: where half values are rounded")
    show.add_argument("--fast-math", action="store_true", help="approximate functions, fused multiply-add")
    show.add_argument("--target", nargs="*", default=["sm_90"], help="sm_80, sm_90, gfx942, … (default: sm_90)")
    prune = commands.add_parser("prune", help="deletes generated sources that have not been used for a while")
    prune.add_argument("--days", type=float, default=30.0)
    given = parser.parse_args(arguments)
    try:
        if given.command == "prune":
            print(f"deleted {prune_cache(given.days)} files from {cache_folder()}")
        else:
            numerics = Numerics(given.precision, given.fast_math)
            _show(given.function, given.arguments, given.gradient, given.target, numerics)
    except (_UsageError, PrecisionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}{_place(error)}", file=sys.stderr)
        return 1
    return 0


def _place(error: Exception) -> str:
    """The line that failed, unless it is ours: our errors say where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename.startswith(_OURS) else f"\n  at {last.filename}:{last.lineno}: {last.line}"


def _show(
    path: str, dtypes: Sequence[str] | None, gradient: bool, targets: Sequence[str], numerics: Numerics
) -> None:
    fn = _function(path)
    inputs = _inputs(fn, dtypes)
    kernel: Pointwise[..., object] = Pointwise(fn, autograd=gradient, name=path.rpartition(":")[2], numerics=numerics)
    _print_kernel(kernel, inputs, targets, fast_math=numerics.fast_math)
    if gradient:
        built = kernel.traced(*inputs)
        flags = tuple(t.requires_grad for t in inputs)
        if not any(built.differentiable):
            raise _UsageError(f"no result of {path} is differentiable.")
        pairs = zip(built.dtypes, built.differentiable, strict=True)
        given = [t.detach() for t in inputs]
        given += [torch.empty(8, device="meta", dtype=dtype) for dtype, there in pairs if there]
        print("\n# --- the gradient ---\n")
        _print_kernel(kernel.gradient(inputs, flags), given, targets, fast_math=numerics.fast_math)


def _print_kernel(
    kernel: Pointwise[..., object] | Gradient, inputs: Sequence[Tensor], targets: Sequence[str], *, fast_math: bool
) -> None:
    traced, source = kernel.traced(*inputs), kernel.source(*inputs)
    print(f"# graph\n{traced.step.graph}\n\n# source\n{source.source}")
    of_result = iter(traced.dtypes)
    dtypes = [inputs[p.index].dtype if p.role is Role.INPUT else next(of_result) for p in source.params]
    for use in compile_offline([OfflineJob(source, target, dtypes, fast_math=fast_math) for target in targets]):
        print(f"# {use}")


def _function(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise _UsageError(f"{path!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _UsageError(f"there is no module {error.name!r}") from None
    except SyntaxError as error:
        raise _UsageError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise _UsageError(f"{module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise _UsageError(f"{path} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _inputs(fn: Callable[..., Any], given: Sequence[str] | None) -> list[Tensor]:
    if given is None:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            raise _UsageError("the number of arguments is not known: give --arguments") from None
        needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if not needed or any(p.kind is p.VAR_POSITIONAL for p in needed):
            raise _UsageError("the number of arguments is not known: give --arguments")
        given = ["float32"] * len(needed)
    return [_input(text) for text in given]


def _input(text: str) -> Tensor:
    name, _, dimensions = text.partition(":")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dimensions not in ("", "0"):
        raise _UsageError(f"{text!r} is no argument: float32, bfloat16, int64, float32:0 are")
    shape = () if dimensions else (8,)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


if __name__ == "__main__":
    sys.exit(main())
