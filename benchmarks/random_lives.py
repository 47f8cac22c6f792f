"""Table of random lives of small networks. A life is a sequence of random acts, such as calls and resets. After each
act, a network in the loop is compared with its compiled twin.

    python benchmarks/random_lives.py [--runs 2000] [--rules 50] [-n PROCESSES] [--device cpu] [--output FILE]
        [--journal FILE]

The networks and acts come from `tests/lives`. On the CPU, the twins run in C++ (launched by Python and by the compiled
launcher) and in Triton's interpreter. On a GPU, they run in Triton (launched by Python and by the compiled launcher).
If a life shows a difference, it is shortened and printed as a Python program. Run this program with `PYTHONPATH=tests`.
The exit status is then 1. With `--journal`, the results of each piece of the run are immediately written to the
journal, and a restarted run continues with the missing pieces.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # This variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from lives.machine import Backends, machine, run  # noqa: E402
from lives.twins import DifferenceError, Twins  # noqa: E402
from measure import describe_machine, publish, table  # noqa: E402

# Number of lives in one piece. All lives of a piece have the same backend, and come from one seed.
PIECE = 20
BACKENDS: dict[str, Backends] = {
    "cpu": (("auto", "auto"), ("cpp", "compiled"), ("cpp", "auto"), ("triton", "auto")),
    "cuda": (("auto", "auto"), ("triton", "compiled"), ("triton", "python")),
}
Piece = dict[str, Any]


def run_piece(number: int, rules: int, device: str) -> Piece:
    """Runs one piece, and returns its counts. If a life shows a difference, also returns the life as a program."""
    torch.set_num_threads(1)
    pair = BACKENDS[device][number % len(BACKENDS[device])]
    Twins.counts.clear()
    different = None
    try:
        run(machine((pair,), device), PIECE, rules, seed=number)
    except DifferenceError as error:
        different = str(error)
    return {"piece": number, "backend": pair, "counts": dict(Twins.counts), "different": different}


def run_pieces(numbers: range, rules: int, device: str, processes: int, journal: Path | None) -> Iterator[Piece]:
    """Yields all pieces, starting with those in the journal."""
    piece_by_number: dict[int, Piece] = {}
    if journal is not None and journal.exists():
        entries = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
        piece_by_number = {entry["piece"]: entry for entry in entries}
    yield from (piece_by_number[number] for number in numbers if number in piece_by_number)
    live = functools.partial(run_piece, rules=rules, device=device)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=5) as pool:
        for piece in pool.imap_unordered(live, [number for number in numbers if number not in piece_by_number]):
            if journal is not None:
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(piece) + "\n")
            yield piece


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help=f"lives, in pieces of {PIECE}")
    parser.add_argument("--rules", type=int, default=50, help="acts per life")
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "random_lives.md")
    parser.add_argument("--journal", type=Path, help="file of outcomes, for a run that can be restarted")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    lives: Counter[str] = Counter()
    different: list[str] = []
    numbers = range(-(-options.runs // PIECE))
    for piece in run_pieces(numbers, options.rules, options.device, options.n, options.journal):
        counts.update(piece["counts"])
        lives[", ".join(piece["backend"])] += piece["counts"].get("lives", 0)
        if piece["different"] is not None:
            different.append(piece["different"])
            print(f"piece {piece['piece']}: {piece['different']}\n", flush=True)
    total = counts.pop("lives", 0)
    names = sorted({name.split(":")[0] for name in counts})
    rows = [(name, counts[name], counts[f"{name}: raised"] or "", counts[f"{name}: refused"] or "") for name in names]
    publish(
        [
            "# Random lives of networks",
            "",
            f"`python benchmarks/random_lives.py --runs {options.runs} --rules {options.rules}"
            f" --device {options.device}`, on",
            describe_machine(torch.device(options.device)),
            "",
            f"{total} lives of networks of two or three layers, with at most {options.rules} acts each. The loop and",
            "the compiled twin are compared after each act in everything visible: outputs, states, sequences, counts,",
            "records, parameters and their gradients (in values, dtypes and strides), and the contents of the",
            "modules. Gradients are equal up to the order of sums; all other values are equal to the last bit. Some",
            "acts raise an error in both twins, such as a call with a state for another batch. One twin refuses some",
            "acts with a clear error, such as a double backward. Then both twins continue from the state of the loop.",
            "",
            f"Different: {len(different)}.",
            "",
            *table(("backend, launcher", "lives"), sorted(lives.items())),
            "",
            *table(("act", "performed", "raised in both", "refused by one"), rows),
            *(line for text in different for line in ("", "```python", *text.splitlines(), "```")),
        ],
        options.output,
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
