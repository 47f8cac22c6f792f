"""The lines of the user's code that call ops."""

from __future__ import annotations

import contextlib
import dis
import linecache
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(__file__) + os.sep
# contextlib is included because an error that leaves a `with` block of torch passes through contextlib.
_LIBRARY_PATHS = (_TORCH, _PACKAGE, "<frozen", contextlib.__file__)
_TRACER = os.path.join(_PACKAGE, "tracing", "_tracer.py")  # the file that calls the core
_OP_LINE = re.compile(r"^    called as (\S+)$", re.MULTILINE)
_TRACE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n    (?P<text>.*))?')


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """One line of the user's code: the file, the line number from 1, and the enclosing function."""

    file: str
    line: int
    function: str
    _text: str | None = field(default=None, compare=False, repr=False)

    @property
    def code(self) -> str:
        """The text of the line without indentation. The text is empty if the file cannot be read."""
        return (linecache.getline(self.file, self.line) if self._text is None else self._text).strip()

    @classmethod
    def of(cls, frame: FrameType) -> SourceLocation:
        """The line that a frame currently runs."""
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}: {self.code or '(no source)'}"


class _Running(threading.local):
    """The location of the node that `run_graph` runs in a thread."""

    location: SourceLocation | None = None


_running = _Running()


@contextlib.contextmanager
def located(location: SourceLocation | None) -> Iterator[None]:
    """Sets the location of the ops that run in this context. With `None`, Python's stack gives the location."""
    previous, _running.location = _running.location, location
    try:
        yield
    finally:
        _running.location = previous


def user_location() -> SourceLocation | None:
    """The location that `located` has set, or else the innermost line of user code between the op and the tracer.

    `None` if there is no such location. For example, autograd runs the formulas of built-in ops without user
    code.
    """
    if _running.location is not None:
        return _running.location
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY_PATHS):
            return SourceLocation.of(frame)
        frame = frame.f_back
    return None


def raised_at(error: BaseException) -> SourceLocation | None:
    """The innermost line of user code that an error passed through."""
    frames = [(entry.tb_frame, entry.tb_lineno) for entry in _iterate_entries(error.__traceback__)]
    for frame, line in reversed(frames):
        if not frame.f_code.co_filename.startswith(_LIBRARY_PATHS):
            return SourceLocation(frame.f_code.co_filename, line, frame.f_code.co_name)
    return None


def _iterate_entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def is_raised_by_torch(error: BaseException) -> bool:
    """True if torch or this package raised `error`, and not a `raise` statement in the user's code.

    False for an `AttributeError` and for a `NameError`.
    """
    if isinstance(error, AttributeError | NameError):
        return False  # `nn.Module` raises the error if the user's object lacks an attribute
    *_, last = _iterate_entries(error.__traceback__)
    code = last.tb_frame.f_code
    if code.co_filename.startswith((_TORCH, _PACKAGE)):
        return True
    return isinstance(error, RuntimeError) and code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def stack_trace(location: SourceLocation | None, op: str) -> str:
    """The text by which FX stores a location on a node. The last line names the op that was called."""
    trace = ""
    if location is not None:
        trace = f'  File "{location.file}", line {location.line}, in {location.function}\n'
        trace += f"    {location.code}\n"
    return f"{trace}    called as {op}\n"


def called_op(node: fx.Node) -> str:
    """The name of the op that the user's code called, and from which `node` was decomposed."""
    match = _OP_LINE.search(node.stack_trace or "")
    return match[1] if match else str(node.target)


def location_of(node: fx.Node) -> SourceLocation | None:
    """The user's line that produced `node`, parsed from `node.stack_trace`, or `None` if no line is recorded there."""
    matches = list(_TRACE_LINE.finditer(node.stack_trace or ""))
    if not matches:
        return None
    last = matches[-1]
    return SourceLocation(last["file"], int(last["line"]), last["function"], last["text"])
