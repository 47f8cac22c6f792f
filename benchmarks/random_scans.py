"""Table of outcomes of random steps in `flexsn_hop.scan`. Three calls in each lowering are compared with a plain loop.

    python benchmarks/random_scans.py [--seeds 0:200] [-n PROCESSES] [--lowerings eager,aot_eager,loop,kernels]
        [--output FILE] [--journal FILE]

The programs come from `tests/random_steps.py`, and run on the CPU. The exit status is 1 if a result differs or a call
fails. With `--journal`, the outcome of each seed is immediately written to the journal, and a restarted run continues
with the missing seeds.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from journal import publish_counts, run_programs  # noqa: E402
from measure import describe_machine  # noqa: E402
from random_steps import CALLS, LOWERINGS, Outcome, compare, random_program  # noqa: E402


def compute_outcome(seed: int, lowerings: Sequence[str]) -> tuple[int, Outcome]:
    torch.set_num_threads(1)
    return seed, compare(random_program(seed), lowerings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="FIRST:END without END")
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--lowerings", default=",".join(LOWERINGS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "random_scans.md")
    parser.add_argument("--journal", type=Path, help="file of outcomes, for a run that can be restarted")
    options = parser.parse_args()
    seeds = range(*map(int, options.seeds.split(":")))
    lowerings = options.lowerings.split(",")
    counts: Counter[tuple[str, str]] = Counter()
    without_loop = 0
    wrong: list[str] = []
    run = functools.partial(compute_outcome, lowerings=lowerings)
    for seed, outcome in run_programs(run, Outcome, seeds, options.n, options.journal, tasks=20):
        without_loop += bool(outcome.no_loop)
        counts.update((lowering, "equal") for lowering in outcome.equal)
        for kind, texts in (("different", outcome.different), ("failed", outcome.failed)):
            counts.update((text.partition(":")[0], kind) for text in texts)
            wrong += [f"seed {seed}: {kind}: {text[:300]}" for text in texts]
        if outcome.different or outcome.failed:
            print(wrong[-1], flush=True)
    kinds = ("equal", "different", "failed")
    lines = [
        "# Random steps of `scan`",
        "",
        f"`python benchmarks/random_scans.py --seeds {options.seeds} --lowerings {options.lowerings}`, on",
        describe_machine(torch.device("cpu")),
        "",
        f"{len(seeds)} random programs with 1 to 3 carried tensors, 0 to 3 sequences and 1 to 4 steps, in float64. The",
        "steps contain indexing, writes into new tensors, broadcasting, reductions, products and views. Each compiled",
        f"function is called {CALLS} times. After each call, its results and gradients are compared with the results",
        "and gradients of a plain loop, and all arguments and captured tensors with their earlier values. Programs",
        f"that also fail as loops are not compared: {without_loop}.",
        "",
        f"| lowering | {' | '.join(kinds)} |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(str(counts[name, kind]) for kind in kinds)} |" for name in lowerings),
    ]
    return publish_counts(lines, counts, wrong, options.output)


if __name__ == "__main__":
    raise SystemExit(main())
