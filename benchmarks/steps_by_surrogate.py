"""Table of errors of step functions with all surrogates in four dtypes, compared with the eager loop.

    python benchmarks/steps_by_surrogate.py [--output FILE] [--jobs N] [--limit SECONDS] [--quick]

The script runs on the GPU, or in Triton's interpreter if there is no GPU. tests/step_zoo.py defines the comparisons.
`--quick` runs only the combinations that the tests run. The exit status is 1 if a combination does not pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # This variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "packages/flexsn-codegen/tests")]

from measure import describe_machine  # noqa: E402
from step_zoo import (  # noqa: E402
    MAX_ERROR,
    MAX_INEXACT,
    SHAPE,
    STEPS,
    Combination,
    Outcome,
    check,
    combinations,
    compare,
    covering,
    label,
)

# An outcome, or the text of an error.
Result = Outcome | str


def measure(index: int) -> Result:
    """Compares the combination with this index, and returns its outcome."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compare(*combinations()[index], device=DEVICE)
        except Exception as error:
            # All other combinations still run.
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def run(indices: Sequence[int], jobs: int, limit: float) -> list[Result]:
    end = time.monotonic() + limit
    # `Pool.__exit__` calls `terminate`, so that a process that hangs does not block this process.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pending = [pool.apply_async(measure, (i,)) for i in indices]
        return [_await_result(p, end) for p in pending]


def _await_result(pending: AsyncResult[Result], end: float) -> Result:
    try:
        return pending.get(max(0.0, end - time.monotonic()))
    except multiprocessing.TimeoutError:
        return "no result in time"


def make_page(results: Sequence[tuple[Combination, Result]], seconds: float) -> str:
    problems = [(label(c), find_problem(c, r)) for c, r in results]
    wrong = [(name, text) for name, text in problems if text]
    equal = sum(isinstance(r, Outcome) and not r.unequal for _, r in results)
    failures = "".join(f"- **{name}**: {text}\n" for name, text in wrong)
    header = f"""# Step functions with surrogates: kernels against the eager loop

Made by `python benchmarks/steps_by_surrogate.py`: the step functions of `tests/step_zoo.py`, one for each kind of
neuron, with each surrogate of `flexsn_nn.surrogate`, for {STEPS} steps of {list(SHAPE)}. Outputs, states and all
gradients are compared with autograd through a plain loop in the same dtype.
{describe_machine(torch.device(DEVICE))} {seconds:.0f} s.

{len(results)} combinations: {len(results) - len(wrong)} pass, {len(wrong)} do not. In {equal} combinations, every
output and state is bitwise equal to the loop.

{failures}
To pass, outputs and states have to be bitwise equal to the loop, and the errors of gradients must not exceed
{MAX_ERROR:.0f} units. If the CPU computes a function in another way, the errors of outputs, states and gradients may be
up to {MAX_INEXACT:.0f} units.

The unit of a result is the eps of the dtype times the largest entry of the tensor. The unit of a gradient of the input
or a state is eps times the largest gradient of the same neuron times the peak of the surrogate, because terms of this
size may cancel. The gradient of a captured parameter is a sum of n terms, and its unit is eps times the largest entry
of the tensor times the square root of n.

The tables show the largest error of a result / of a gradient / of a parameter's gradient, in these units.

"""
    tables = (
        *_make_table("step function", results, lambda c: c[0].name),
        "",
        *_make_table("surrogate", results, lambda c: type(c[1]).__name__),
        "",
    )
    return header + "\n".join(tables)


def find_problem(combination: Combination, result: Result) -> str:
    return result if isinstance(result, str) else check(combination, result, DEVICE)


def _make_table(
    title: str, results: Sequence[tuple[Combination, Result]], key: Callable[[Combination], str]
) -> list[str]:
    dtypes = list(dict.fromkeys(c[2] for c, _ in results))
    groups: dict[str, dict[torch.dtype, list[Outcome]]] = {}
    for c, r in results:
        if isinstance(r, Outcome):
            groups.setdefault(key(c), {}).setdefault(c[2], []).append(r)
    names = " | ".join(str(d).removeprefix("torch.") for d in dtypes)
    rows = [f"| {title} | {names} |", "|---" * (len(dtypes) + 1) + "|"]
    for name, by_dtype in groups.items():
        rows.append(f"| {name} | {' | '.join(_make_cell(by_dtype.get(d, [])) for d in dtypes)} |")
    return rows


def _make_cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    largest = (max(getattr(o, part) for o in outcomes) for part in ("forward", "gradient", "parameter"))
    return " / ".join(f"{value:.2g}" for value in largest)


def main() -> int:
    """Writes the page, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/steps_by_surrogate.md")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes")
    parser.add_argument(
        "--limit", type=float, default=3000.0, help="seconds after which the page is written with the results so far"
    )
    parser.add_argument("--quick", action="store_true", help="only the combinations that the tests run")
    options = parser.parse_args()
    all_combinations = combinations()
    names = {label(c) for c in covering()} if options.quick else {label(c) for c in all_combinations}
    indices = [i for i, c in enumerate(all_combinations) if label(c) in names]
    begun = time.perf_counter()
    results = run(indices, options.jobs, options.limit)
    pairs = [(all_combinations[i], r) for i, r in zip(indices, results, strict=True)]
    text = make_page(pairs, time.perf_counter() - begun)
    output = options.output or ROOT / "benchmarks/results/steps_by_surrogate.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(text)
    return int(any(find_problem(c, r) for c, r in pairs))


if __name__ == "__main__":
    sys.exit(main())
