"""Table that compares PyTorch's elementwise ops and their gradients, in `pointwise` and in `FlexSN`, with eager mode.

    TRITON_INTERPRET=1 python benchmarks/opinfo_table.py [--samples N] [--out FILE] [VARIANT ...]

The script runs in Triton's interpreter on the CPU, and takes about half an hour. Its exit status is 1 if a result is
wrong, if an error does not name the refused op, if `pointwise` and `FlexSN` disagree, or if fewer than 95 % of the runs
pass.
`tests/test_opinfo.py` runs a quick subset.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import triton  # noqa: E402
from opinfo import (  # noqa: E402
    CANCELLING,
    DIFFERENTIABLE,
    DTYPES,
    EXCEPTIONS,
    Outcome,
    check,
    is_differentiable,
    variant_name,
    variants,
)

Outcomes = dict[torch.dtype, Outcome]


def main() -> int:
    """Writes the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("variants", nargs="*", help="names of variants (default: all)")
    parser.add_argument("--samples", type=int, default=4, help="number of PyTorch's samples per variant and dtype")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/opinfo.md if all run")
    arguments = parser.parse_args()
    selected = [v for v in variants() if not arguments.variants or variant_name(v) in arguments.variants]
    rows = []
    counts = Counter(passes=0, refused=0, wrong=0)
    runs: Counter[str] = Counter()
    for info in selected:
        limits = {"samples": arguments.samples, "special": True}
        forward = {d: check(info, d, **limits) for d in DTYPES if d in info.dtypes}
        smooth = [d for d in DIFFERENTIABLE if is_differentiable(info, d)]
        backward = {d: check(info, d, **limits, gradient=True) for d in smooth}
        for outcome in (*forward.values(), *backward.values()):
            runs.update(
                runs=outcome.runs,
                passed=outcome.equal + outcome.close,
                refused=outcome.refused,
                wrong=len(outcome.wrong),
                crashed=len(outcome.crashed),
                apart=len(outcome.apart),
            )
        verdicts = [_judge(forward) or "refused", _judge(backward) or "–"]
        counts["wrong" if "wrong" in verdicts else "refused" if "refused" in verdicts else "passes"] += 1
        cells = [f"`{variant_name(info)}`"]
        for verdict, outcomes in zip(verdicts, (forward, backward), strict=True):
            cells += [verdict, _count_equal(outcomes)]
        rows.append(f"| {' | '.join([*cells, _find_reason(forward, backward)])} |")
        print(rows[-1], flush=True)
    text = _make_page(rows, counts, runs, arguments.samples)
    out = arguments.out or (None if arguments.variants else ROOT / "benchmarks/results/opinfo.md")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    print(dict(counts), dict(runs))
    failed = runs["wrong"] + runs["crashed"] + runs["apart"]
    return int(failed > 0 or runs["passed"] < 0.95 * runs["runs"])


def _judge(outcomes: Outcomes) -> str:
    """Returns the worst verdict over the dtypes, or an empty text if no sample ran."""
    results = outcomes.values()
    if any(o.wrong or o.crashed or o.apart for o in results):
        return "wrong"
    return (
        "refused" if any(o.refused for o in results) else "passes" if any(o.equal or o.close for o in results) else ""
    )


def _count_equal(outcomes: Outcomes) -> str:
    equal = sum(o.equal for o in outcomes.values())
    total = equal + sum(o.close + len(o.wrong) for o in outcomes.values())
    return f"{equal} / {total}" if total else ""


def _find_reason(forward: Outcomes, backward: Outcomes) -> str:
    both = [*forward.items(), *backward.items()]
    wrong = [f"{dtype}: {problem}" for dtype, o in both for problem in (*o.wrong, *o.crashed, *o.apart)]
    refused = sorted({o.reason for _, o in both if o.refused})
    text = next(iter([*wrong, *refused]), "" if _judge(forward) else "complex numbers only")
    return text.replace("|", "\\|").replace("\n", " ")


def _make_page(rows: list[str], counts: Counter[str], runs: Counter[str], samples: int) -> str:
    share = 100 * runs["passed"] / max(runs["runs"], 1)
    return f"""# PyTorch's elementwise ops by `pointwise` and by `FlexSN`

Made by `python benchmarks/opinfo_table.py` with torch {torch.__version__} and Triton {triton.__version__}, in
Triton's interpreter on the CPU. For each variant and dtype, {samples} of PyTorch's samples and special values (NaN,
infinities, zeros of both signs, denormal and huge numbers; all pairs for two arguments) are compared with eager mode.
If PyTorch lists the variant as differentiable, "backward" compares results and gradients for the same samples, in
float64, float32, float16 and bfloat16. "–" means that no dtype has a gradient. Each sample runs twice, as a kernel of
`pointwise` and as a step of `FlexSN`, and the worse of the two outcomes counts. Ops that are random or return complex
numbers are omitted.

Of {runs["runs"]} runs, {runs["passed"]} pass ({share:.1f} %), {runs["refused"]} are refused
(with an `UnsupportedOpError`), {runs["wrong"]} are wrong, {runs["crashed"]} end with another error. In {runs["apart"]}
runs, `pointwise` and `FlexSN` disagree. By variant: {counts["passes"]} pass, {counts["refused"]} are refused in at
least one dtype or in the backward, {counts["wrong"]} are wrong.

Integers and bool pass if they are equal. A floating-point result passes in three cases: it is within the tolerance of
`torch.testing.assert_close` of eager mode; it is within this tolerance of the rounded result of eager mode in float64;
or it is at least as close to eager mode in float64 as eager mode in its dtype is. (Eager mode has some errors in
float32, such as NaN for `gelu(inf)`.) "Equal" counts samples in which every element is equal. These ops differ on
purpose:

{_format_notes(EXCEPTIONS.items())}

In the backward of the following ops, errors are relative to the values that are subtracted:

{_format_notes(CANCELLING.items())}

| variant | forward | equal | backward | equal | why |
|---|---|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


def _format_notes(reasons: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {why}." for name, why in reasons)


if __name__ == "__main__":
    sys.exit(main())
