"""Comparison of a benchmark's figures in two checkouts. It shows which rows of the benchmark a change makes faster or
slower.

    python benchmarks/before_after.py FOLDER SCRIPT --commit NAME [--output FILE] [--runs 2] [-- ARGUMENTS ...]

`FOLDER` holds the other checkout (`git archive COMMIT packages benchmarks | tar x -C FOLDER`). Each checkout runs its
script with its packages in separate processes, alternately: before, after, before, after. For each row, the smallest
figures of the two checkouts are compared, because other processes have disturbed these runs least. The spread
of a checkout is its largest figure divided by its smallest figure. The table shows the larger of the two spreads. A
ratio within the spread is not a significant difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import describe_machine, publish, table

Figures = dict[tuple[str, ...], dict[str, float]]
"""The figures of each row, by column."""
HERE = Path(__file__).parents[1]
COLUMNS = {
    "scan_overhead.py": ("call", "graph", "kernels"),
    "scan_table.py": ("call / copy", "graph / copy"),
}


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_figures(text: str, columns: tuple[str, ...]) -> Figures:
    """Returns the figures of a table in Markdown. The name of a row consists of the cells before the first number with
    a decimal point.
    """
    lines = [split_cells(line) for line in text.splitlines() if line.startswith("|")]
    header, rows = lines[0], lines[2:]
    figures_by_row: Figures = {}
    for row in rows:
        name = tuple(row[: next(i for i, cell in enumerate(row) if is_number(cell) and "." in cell)])
        texts = {column: row[header.index(column)] for column in columns}
        figures_by_row[name] = {column: float(cell) for column, cell in texts.items() if is_number(cell)}
    return figures_by_row


def run_script(checkout: Path, script: str, arguments: list[str], columns: tuple[str, ...]) -> Figures:
    """Runs the script of a checkout, and returns its figures."""
    packages = os.pathsep.join(str(folder) for folder in sorted(checkout.glob("packages/*/src")))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "table.md"
        command = [sys.executable, str(checkout / "benchmarks" / script), "--output", str(output), *arguments]
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONPATH": packages}, cwd=checkout, stdout=subprocess.DEVNULL
        )
        return read_figures(output.read_text(), columns)


def compare(before: list[Figures], after: list[Figures]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, first_figures in before[0].items():
        if name not in after[0]:
            continue
        for column in first_figures:
            old, new = ([run_figures[name][column] for run_figures in runs] for runs in (before, after))
            spread = max(max(old) / min(old), max(new) / min(new))
            runs = [" ".join(f"{value:g}" for value in values) for values in (old, new)]
            rows.append([" ".join(name), column, *runs, f"{min(new) / min(old):.2f}", f"{spread:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("script", choices=list(COLUMNS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/before_after.md"))
    parser.add_argument("--commit", required=True, help="commit of the other checkout, for the heading")
    parser.add_argument("--runs", type=int, default=2)
    options, arguments = parser.parse_known_args()
    arguments = [argument for argument in arguments if argument != "--"]
    columns = COLUMNS[options.script]
    before: list[Figures] = []
    after: list[Figures] = []
    for _ in range(options.runs):
        for results, checkout in ((before, options.folder.resolve()), (after, HERE)):
            results.append(run_script(checkout, options.script, arguments, columns))
    head = ("row", "figure", "before", "after", "after / before", "spread")
    rows = compare(before, after)
    if not rows:
        raise SystemExit("the two tables have no row in common")
    publish(
        [
            f"# `{' '.join([options.script, *arguments])}` before and after",
            "",
            f"`python benchmarks/before_after.py`: before is {options.commit}. Each checkout ran {options.runs} times,",
            "alternately. The ratio is that of the smallest figures. `spread` is the largest ratio between runs of",
            "the same code.",
            describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "",
            *table(head, rows),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
