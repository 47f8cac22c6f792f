"""Table of outcomes of random step functions with captured tensors. The values, dtypes and gradients of compiled scans
are compared with the loop.

    python benchmarks/random_gradients.py [--seeds 0:1000] [-n PROCESSES] [--device cpu] [--on-cpu cpp] [--output FILE]
        [--journal FILE]

The cores and calls come from `tests/gradient_cores.py`. On the CPU, they run in Triton's interpreter or in C++. Each
call counts once. If the loop itself raises an error, nothing is compared. Otherwise, there are four outcomes: the
compiled scan is equal to the loop, it is different, it is refused with an error of FlexSN that names the line of the
core, or it fails with any other error. The exit status is 1 if any call is different or fails. With `--journal`, the
outcome of each seed is immediately written to the journal, and a restarted run continues with the missing seeds.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections import Counter
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # This variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from gradient_cores import Outcome, compare, random_core  # noqa: E402
from journal import publish_counts, run_programs  # noqa: E402
from measure import describe_machine  # noqa: E402

from flexsn_runtime import TargetName  # noqa: E402

COUNTED = ("equal to the loop", "different", "refused by name", "failed otherwise", "the loop itself fails")


def compute_outcome(seed: int, device: str, on_cpu: TargetName) -> tuple[int, Outcome]:
    torch.set_num_threads(1)
    # For odd seeds, the forward saves values for the backward. For even seeds, the backward recomputes these values.
    residuals = ("recompute", "save")[seed % 2]
    try:
        return seed, compare(random_core(seed), device=device, residuals=residuals, on_cpu=on_cpu)
    except Exception as error:
        return seed, Outcome(broken=[f"{type(error).__name__}: {error}"])


def shorten(refusal: str) -> str:
    """Returns the text of a refusal without the words that are specific to one core."""
    text = refusal.split(": ", 1)[1].split("\n")[0]
    return re.sub(r"\([^()]*\)|\[[^\[\]]*\]|number \d+|\d+", "…", text)[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END without END, or a list: 625,664")
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument(
        "--on-cpu", choices=["triton", "cpp"], default="triton", help="language of the kernels on the CPU"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "random_gradients.md")
    parser.add_argument("--journal", type=Path, help="file of outcomes, for a run that can be restarted")
    options = parser.parse_args()
    seeds = [int(seed) for seed in re.split("[:,]", options.seeds)]
    if ":" in options.seeds:
        seeds = list(range(*seeds))
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    wrong: list[str] = []
    earlier = 0
    if options.journal is not None and options.journal.exists():
        earlier = len(options.journal.read_text(encoding="utf-8").splitlines())
    run = functools.partial(compute_outcome, device=options.device, on_cpu=options.on_cpu)
    for seed, outcome in run_programs(run, Outcome, seeds, options.n, options.journal, tasks=50):
        counts["equal to the loop"] += outcome.same
        counts["the loop itself fails"] += outcome.no_core
        counts["different"] += len(outcome.different)
        counts["refused by name"] += len(outcome.refused)
        counts["failed otherwise"] += len(outcome.broken)
        refusals.update(shorten(text) for text in outcome.refused)
        for text in outcome.different + outcome.broken:
            wrong.append(f"seed {seed}: {text}")
            print(wrong[-1], flush=True)
        if seed % 100 == 99:
            print(f"seed {seed}: {dict(counts)}", flush=True)
    lines = [
        "# Random step functions: gradients of computations with captured tensors",
        "",
        f"`python benchmarks/random_gradients.py --seeds {options.seeds} --device {options.device}"
        f" --on-cpu {options.on_cpu}`, on",
        describe_machine(torch.device(options.device)),
        "",
        f"{len(seeds)} random step functions, each with two to four calls, with in-place operations and custom",
        "`autograd.Function`s on captured tensors, parameters that are frozen and trained between calls, values that",
        "Python code reads and that change between calls, results that no loss uses, and 0 to 11 steps, in float64.",
        "The values, dtypes and gradients of compiled scans are compared with the loop, unless the loop itself raises",
        "an error.",
        *([f"The outcomes of {earlier} functions come from an earlier part of the run."] if earlier else []),
        "",
        "| calls | number |",
        "|---|---:|",
        *(f"| {name} | {counts[name]} |" for name in COUNTED),
        "",
        "| refused because | number |",
        "|---|---:|",
        *(f"| {text.replace('|', '/')} | {number} |" for text, number in refusals.most_common()),
    ]
    return publish_counts(lines, counts, wrong, options.output)


if __name__ == "__main__":
    raise SystemExit(main())
