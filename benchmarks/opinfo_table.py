"""All of PyTorch's elementwise ops through a pointwise kernel, against eager mode: a table of every variant.

    TRITON_INTERPRET=1 python benchmarks/opinfo_table.py [--samples N] [--out FILE] [VARIANT ...]

Runs in Triton's interpreter, on the CPU; about ten minutes. Ends with status 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages/flexsn-codegen/tests"))

import torch  # noqa: E402
import triton  # noqa: E402
from codegen_opinfo import DTYPES, EXCEPTIONS, Outcome, check, variant_name, variants  # noqa: E402


def main() -> int:
    """Writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("variants", nargs="*", help="names of variants; by default all")
    parser.add_argument("--samples", type=int, default=4, help="of PyTorch's samples per variant and dtype")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/opinfo.md, or nowhere for some")
    arguments = parser.parse_args()
    chosen = [v for v in variants() if not arguments.variants or variant_name(v) in arguments.variants]
    rows = []
    counts = {"passes": 0, "refused": 0, "wrong": 0}
    for info in chosen:
        dtypes = [d for d in DTYPES if d in info.dtypes]
        outcomes = {d: check(info, d, samples=arguments.samples, special=True) for d in dtypes}
        verdict, why = _verdict(outcomes)
        counts[verdict] += 1
        equal = sum(o.equal for o in outcomes.values())
        total = equal + sum(o.close + len(o.wrong) for o in outcomes.values())
        rows.append(f"| `{variant_name(info)}` | {verdict} | {len(dtypes)} | {equal} / {total} | {why} |")
        print(rows[-1], flush=True)
    text = _page(rows, counts, arguments.samples)
    out = arguments.out or (None if arguments.variants else ROOT / "benchmarks/results/opinfo.md")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    print(counts)
    return int(counts["wrong"] > 0)


def _verdict(outcomes: dict[torch.dtype, Outcome]) -> tuple[str, str]:
    wrong = [f"{dtype}: {o.wrong[0]}" for dtype, o in outcomes.items() if o.wrong]
    if wrong:
        return "wrong", _cell(wrong[0])
    refused = sorted({o.refused for o in outcomes.values() if o.refused})
    if not any(o.equal or o.close or o.refused for o in outcomes.values()):
        return "refused", "complex numbers only"
    return ("refused", _cell(refused[0])) if refused else ("passes", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _page(rows: list[str], counts: dict[str, int], samples: int) -> str:
    exceptions = "\n".join(f"- `{name}`: {why}." for name, why in EXCEPTIONS.items())
    header = f"""# PyTorch's elementwise ops through a pointwise kernel

Made by `python benchmarks/opinfo_table.py` with torch {torch.__version__} and Triton {triton.__version__}, in
Triton's interpreter on the CPU. For each variant and dtype: {samples} of PyTorch's own samples, and special
values (NaN, infinities, zeros of both signs, denormal, huge; for two arguments all pairs), against eager mode.

{counts["passes"]} variants pass, {counts["refused"]} are refused (by `UnsupportedOpError`, in at least one
dtype), {counts["wrong"]} are wrong.

Passing is: equal for integers and bool; for floats within `torch.testing.assert_close`'s tolerance of eager
mode, or of eager mode in float64, rounded (its float32 code is off in places: `gelu(inf)` is NaN). "Equal" counts
samples whose every element is equal. On purpose different:

{exceptions}

| variant | | dtypes | equal | why |
|---|---|---|---|---|
"""
    return header + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
