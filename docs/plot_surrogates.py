"""Draws every surrogate gradient of `flexsn_nn.surrogate`, with its default parameters.

python docs/plot_surrogates.py [--out docs/images/surrogates.svg]
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from dataclasses import fields
from pathlib import Path

import matplotlib as mpl
import torch

from flexsn_nn import surrogate
from flexsn_nn.surrogate import Surrogate

mpl.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = 4


def surrogates() -> list[Surrogate]:
    """Returns one surrogate of each class with default parameters, in the order of `surrogate.__all__`, without
    aliases.
    """
    classes = [getattr(surrogate, name) for name in surrogate.__all__]
    concrete = [c for c in classes if inspect.isclass(c) and issubclass(c, Surrogate) and not inspect.isabstract(c)]
    return [kind() for kind in dict.fromkeys(concrete)]


def title(g: Surrogate) -> str:
    """Returns the name of the class with its parameters, such as `ATan(alpha=2)`."""
    parameters = [f"{f.name}={getattr(g, f.name):g}" for f in fields(g) if f.name != "strict"]
    return f"{type(g).__name__}({', '.join(parameters)})"


def draw(path: Path) -> list[str]:
    """Writes the figure, and returns the titles in it."""
    drawn = surrogates()
    # The points avoid 0, where a gradient may be infinite or jump.
    x = torch.linspace(-4.0, 4.0, 400)
    # Text is stored as text, and the file does not depend on the time or the machine, so equal figures are equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flexsn", "font.size": 8}):
        rows = math.ceil(len(drawn) / COLUMNS)
        figure, grid = plt.subplots(rows, COLUMNS, figsize=(10, 1.9 * rows), sharex=True, layout="constrained")
        for axes in grid.flat:
            axes.set_visible(False)
        for g, axes in zip(drawn, grid.flat, strict=False):
            axes.set_visible(True)
            axes.plot(x.numpy(), g.gradient(x).numpy(), linewidth=1.2)
            axes.axvline(0.0, color="gray", linewidth=0.5)
            axes.set_title(title(g), fontsize=8)
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        figure.supxlabel("x = membrane − threshold")
        figure.supylabel("g'(x)")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return [title(g) for g in drawn]


def main(arguments: list[str]) -> int:
    """Draws the surrogates, and prints a summary."""
    parser = argparse.ArgumentParser(prog="plot_surrogates", description="Draws every surrogate gradient.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "surrogates.svg")
    chosen = parser.parse_args(arguments)
    print(f"{len(draw(chosen.out))} surrogates in {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
