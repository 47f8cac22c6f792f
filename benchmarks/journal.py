"""Outcomes of random programs that run in several processes. A journal on disk stores the outcomes, so that a restarted
run only computes the missing outcomes.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


def run_programs(
    run: Callable[[int], tuple[int, Outcome]],
    make_outcome: Callable[..., Outcome],
    seeds: Sequence[int],
    processes: int,
    journal: Path | None,
    *,
    tasks: int,
) -> Iterator[tuple[int, Outcome]]:
    """Runs the programs of all seeds, and yields each seed with its outcome. The outcomes in the journal come first.

    Args:
        run: function that returns the seed and its outcome for a seed. It is called in another process.
        made: function that makes an outcome from its fields.
        seeds: seeds of the programs.
        processes: number of processes.
        journal: file of the journal, or `None`.
        tasks: number of seeds after which a process is replaced by a new process.
    """
    outcome_by_seed: dict[int, Outcome] = {}
    if journal is not None and journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            seed = entry.pop("seed")
            outcome_by_seed[seed] = make_outcome(**entry)
    yield from ((seed, outcome_by_seed[seed]) for seed in seeds if seed in outcome_by_seed)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=tasks) as pool:
        for seed, outcome in pool.imap_unordered(run, [seed for seed in seeds if seed not in outcome_by_seed]):
            if journal is not None:
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": seed, **asdict(outcome)}) + "\n")  # type: ignore[call-overload]
            yield seed, outcome


def publish_counts(lines: Sequence[str], counts: Mapping[Any, int], wrong: Sequence[str], path: Path) -> int:
    """Writes the lines and the wrong outcomes, and returns the exit status: 1 if an outcome is wrong, otherwise 0."""
    wrong_lines = ["", "Wrong:", "", *(f"- {text}" for text in wrong)] if wrong else []
    path.write_text("\n".join([*lines, *wrong_lines]) + "\n", encoding="utf-8")
    print(f"{dict(counts)} -> {path}")
    return 1 if wrong else 0
