"""Warnings that name the user's line: the innermost line of the call that belongs neither to torch nor to this project.

flexsn-graph and flexsn-hop each have a copy of this file, because neither depends on the other. A test checks that the
copies are equal.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_LIBRARIES = frozenset(
    ("torch", "functorch", "triton", "flexsn_graph", "flexsn_codegen", "flexsn_runtime", "flexsn_hop", "flexsn_nn")
)
_BETWEEN = frozenset(("contextlib", "functools", "threading", "concurrent", "importlib", "copy", "asyncio"))
_GENERATED = ("<eval_with_key>", "<frozen ")


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code, or `None` if the thread runs no user code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning] = UserWarning, *, otherwise: tuple[str, int] | None = None) -> None:
    """Issues a warning at the user's line.

    Args:
        otherwise: the file and the line to name if the thread runs no user code. By default, this is the line that
            calls `warn`.
    """
    frame = user_frame()
    if frame is None and otherwise is not None:
        file, line = otherwise
        warnings.warn_explicit(message, category, file, line)
        return
    reported = sys._getframe(1) if frame is None else frame
    warnings.warn_explicit(
        message,
        category,
        reported.f_code.co_filename,
        reported.f_lineno,
        module=reported.f_globals.get("__name__"),
        registry=reported.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    if not isinstance(name, str) or frame.f_code.co_filename.startswith(_GENERATED):
        return True
    return name.partition(".")[0] in _LIBRARIES or name.partition(".")[0] in _BETWEEN
