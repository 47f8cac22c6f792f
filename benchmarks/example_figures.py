"""Table of the final results of the examples, which run on the CPU, as for a new user without a GPU.

    python benchmarks/example_figures.py [--output FILE] [--only NAME ...]

Each example runs without arguments in a separate process, in an empty folder. (distributed.py runs in two processes,
started by torchrun.) The table shows no times, because they are not reproducible. The exit status is 1 if an example
fails or does not print its figure. vowels.py needs the package `aeon`. With `--only`, the rows of the other examples
come from the existing table.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from flexsn_codegen.targets.cpp import why_no_compiler

ROOT = Path(__file__).resolve().parents[1]
PERCENT = r"[\d.]+%"

# For each example, the pattern of its figure in the output. If the pattern matches several times, the figure consists
# of all matches in order.
FIGURES = {
    "digits": rf"^held-out accuracy {PERCENT}",
    "evidence": rf"accuracy {PERCENT} over \d+ steps",
    "resonator": rf"accuracy {PERCENT}",
    "shapes": rf"accuracy {PERCENT}",
    "vowels": rf"accuracy {PERCENT} of \d+ recordings in \d+ streams",
    "convert": r"\d+ of \d+ spikes differ",
    "mixed_precision": rf"held-out accuracy {PERCENT}",
    "recurrent": rf"accuracy {PERCENT} over \d+ steps",
    "long_sequence": rf"accuracy {PERCENT} on \d+ new sequences",
    "truncated_bptt": r"differs by \S+ from the whole sequence's",
    "distributed": rf"^held-out accuracy {PERCENT}",
    "gated_activation": r"^ *result: relative error \S+",
    "datasets/images": rf"^held-out accuracy {PERCENT}",
    "datasets/events": rf"^held-out accuracy {PERCENT}",
    "datasets/audio": rf"^held-out accuracy {PERCENT}",
}


def compute_figure(name: str) -> str:
    """Runs an example, and returns its figure."""
    command = [sys.executable]
    if name == "distributed":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Triton's interpreter is off, and no GPU is visible, as for a new user without a GPU.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [*command, str(ROOT / "examples" / f"{name}.py")],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stderr}")
    matches = re.findall(FIGURES[name], process.stdout, re.MULTILINE)
    if not matches:
        raise SystemExit(f"{name} prints no text that matches {FIGURES[name]!r}:\n{process.stdout}")
    return "; ".join(text.strip() for text in matches)


def read_figures(path: Path) -> dict[str, str]:
    """Returns the figures of a table that this script has written earlier, by example."""
    table = path.read_text(encoding="utf-8") if path.exists() else ""
    return dict(re.findall(r"^\| (\S+)\.py \| (.+) \|$", table, re.MULTILINE))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Final result of each example.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "example_figures.md")
    parser.add_argument("--only", nargs="+", choices=sorted(FIGURES), metavar="NAME")
    options = parser.parse_args(arguments)
    figures = read_figures(options.output) if options.only else {}
    for name in options.only or FIGURES:
        figures[name] = compute_figure(name)
        print(f"{name}: {figures[name]}", flush=True)
    rows = [f"| {name}.py | {figures[name]} |" for name in FIGURES if name in figures]
    neurons = "in the plain loop" if why_no_compiler() else "as kernels in C++"
    head = [
        "# Final results of the examples",
        "",
        "`python benchmarks/example_figures.py`. The docstring of the script describes how the examples run.",
        f"CPU ({platform.machine()}), torch {torch.__version__}, Python {platform.python_version()}, {date.today()}.",
        f"Neurons run {neurons}. Run the other way, the figures differ in the last bits.",
        "",
        "| example | figure |",
        "| --- | --- |",
    ]
    options.output.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
