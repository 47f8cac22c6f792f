"""Describes lines of the user's code for messages, with the modules that run these lines."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

Names = Mapping[nn.Module, str]

_LIBRARIES = sys.stdlib_module_names | {"torch", "triton"}


def names_of(net: nn.Module) -> Names:
    """Returns the names of a network's modules, for messages."""
    return {module: f"{name} ({type(module).__name__})" if name else type(module).__name__
            for name, module in net.named_modules()}  # fmt: skip


def line_of_call(names: Names) -> str:
    """Describes the line of the user's code that is running."""
    return _describe(list(_walk_callers(sys._getframe(1))), names)


def line_of_error(error: BaseException, names: Names) -> str:
    """Describes the line of the user's code that raised an error."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return _describe(frames[::-1], names)


def line_of_function(function: Callable[..., Any]) -> str:
    """Describes a function by its name and line."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{name}" if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _walk_callers(frame: types.FrameType | None) -> Iterator[tuple[types.FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _describe(frames: list[tuple[types.FrameType, int]], names: Names) -> str:
    """Describes the module and the line of the user's code.

    Args:
        frames: frames with their line numbers. The innermost frame is first.
    """
    line = module = None
    for frame, number in frames:
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, nn.Module):
            module = names.get(owner)
        file = frame.f_code.co_filename
        if line is None and not _is_library(frame):
            text = linecache.getline(file, number).strip()
            line = f"{os.path.basename(file)}:{number}" + (f", `{text}`" if text else "")
        if frame.f_globals.get("__name__") == "flexsn_nn.graphs._step":
            break
    if module is None:
        return line or "the step"
    return f"{module}, {line}," if line else module


def _is_library(frame: types.FrameType) -> bool:
    """True for code of the standard library, of torch and of this project."""
    name = frame.f_globals.get("__name__")
    if not isinstance(name, str):
        return True
    return name.partition(".")[0] in _LIBRARIES or name.startswith("flexsn_")
