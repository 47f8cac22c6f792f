"""Conversion of tutorials, which are scripts with cells. Each script runs, and becomes a page with its output and
figures, and a notebook.

A cell begins with `# %%`, or with `# %% [markdown]` if its comments are text. All code cells share one namespace.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?[ ]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of text or code.

    Attributes:
        source: Markdown, or Python.
        is_markdown: True if the source is Markdown.
        line: number of the line at which the source begins in the script.
    """

    source: str
    is_markdown: bool
    line: int


@dataclass(frozen=True, slots=True)
class Results:
    """Output of a cell.

    Attributes:
        printed: standard output.
        figures: figures as PNG.
    """

    printed: str = ""
    figures: tuple[bytes, ...] = ()


def cells_of(text: str) -> list[Cell]:
    """Returns the cells of a script.

    Raises:
        ValueError: code precedes the first cell.
    """
    marks = list(MARK.finditer(text))
    if text[: marks[0].start() if marks else len(text)].strip():
        raise ValueError("a tutorial begins with a line '# %%' or '# %% [markdown]'")
    cells = []
    for mark, next_mark in zip(marks, [*marks[1:], None], strict=True):
        source = text[mark.end() : len(text) if next_mark is None else next_mark.start()]
        line = text.count("\n", 0, mark.end()) + 2
        if mark["markdown"]:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        cells.append(Cell(source.strip("\n"), mark["markdown"] is not None, line))
    return cells


def run(path: Path, cells: Sequence[Cell]) -> list[Results]:
    """Runs the code of the cells in order, in a separate module. Tracebacks show lines of the script."""
    from matplotlib import pyplot

    module = ModuleType(f"tutorial_{path.stem}")
    sys.modules[module.__name__] = module  # so that classes of the script can be found by name
    results = []
    try:
        for cell in cells:
            if cell.is_markdown:
                results.append(Results())
                continue
            code = compile("\n" * (cell.line - 1) + cell.source, str(path), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, module.__dict__)
            figures = []
            for number in pyplot.get_fignums():
                picture = io.BytesIO()
                pyplot.figure(number).savefig(picture, format="png", dpi=110)
                figures.append(picture.getvalue())
            pyplot.close("all")
            results.append(Results(printed.getvalue(), tuple(figures)))
    finally:
        del sys.modules[module.__name__]
    return results


def as_page(path: Path, cells: Sequence[Cell], results: Sequence[Results]) -> str:
    """Returns a page in Markdown. Figures are files next to the page, with the names in `pictures`."""
    parts = []
    names = iter(pictures(path, results))
    for cell, result in zip(cells, results, strict=True):
        parts.append(cell.source if cell.is_markdown else f"```python\n{cell.source}\n```")
        if result.printed:
            parts.append(f"```{{code-block}} none\n:class: printed\n\n{result.printed.rstrip()}\n```")
        parts += [f"![drawn by the cell above]({next(names)})" for _ in result.figures]
    name = path.with_suffix(".ipynb").name
    parts.append(f"This page is a script, [{path.name}]({path.name}), and a notebook, {{download}}`{name}`.")
    return "\n\n".join(parts) + "\n"


def pictures(path: Path, results: Sequence[Results]) -> dict[str, bytes]:
    """Returns the figures by the names of their files."""
    figures = [picture for result in results for picture in result.figures]
    return {f"{path.stem}_{number}.png": picture for number, picture in enumerate(figures)}


def as_notebook(cells: Sequence[Cell], results: Sequence[Results]) -> str:
    """Returns a Jupyter notebook with outputs."""
    notebook_cells = []
    for number, (cell, result) in enumerate(zip(cells, results, strict=True)):
        notebook_cells.append(_make_notebook_cell(number, cell, result))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": notebook_cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1
    )


def _make_notebook_cell(number: int, cell: Cell, result: Results) -> dict[str, Any]:
    kind = "markdown" if cell.is_markdown else "code"
    entry: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": cell.source}
    if not cell.is_markdown:
        outputs: list[dict[str, Any]] = []
        if result.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": result.printed})
        for picture in result.figures:
            data = {"image/png": base64.b64encode(picture).decode()}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        entry |= {"execution_count": None, "outputs": outputs}
    return entry


def write_tutorials(folder: Path) -> None:
    """Runs the scripts in a folder, and writes a page, figures and a notebook next to each script."""
    for path in sorted(folder.glob("*.py")):
        cells = cells_of(path.read_text(encoding="utf-8"))
        results = run(path, cells)
        for name, picture in pictures(path, results).items():
            (folder / name).write_bytes(picture)
        path.with_suffix(".ipynb").write_text(as_notebook(cells, results), encoding="utf-8")
        path.with_suffix(".md").write_text(as_page(path, cells, results), encoding="utf-8")
