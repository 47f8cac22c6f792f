"""The user's source line that an FX node came from."""

from __future__ import annotations

import os
import re

from torch import fx

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n(?:\s+(?P<code>.*))?')


def source_line(node: fx.Node) -> tuple[str, int, str] | None:
    """`(file, line, code)` of the innermost frame in `node.stack_trace`."""
    matches = list(_LINE.finditer(node.stack_trace or ""))
    if not matches:
        return None
    last = matches[-1]
    return last["file"], int(last["line"]), (last["code"] or "").strip()


def citation(node: fx.Node) -> str:
    """`file.py:12: code`, for a comment; the file's name alone, so that it is the same on every machine."""
    where = source_line(node)
    if where is None:
        return ""
    file, line, code = where
    # On one line whatever the names hold: the text ends up in a comment.
    return " ".join(f"{os.path.basename(file)}:{line}: {code}".split())
