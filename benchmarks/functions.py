"""Table of functions as users write them, in `pointwise` and in eager mode: results and gradients in three dtypes.

    TRITON_INTERPRET=1 python benchmarks/functions.py [--output FILE] [NAME ...]

The functions come from `function_catalog.py`. The script runs on a GPU if there is one. Its exit status is 1 if a
result is wrong, if an error does not name the refused function, or if fewer than 97 % of the functions work.
`tests/test_functions.py` runs some of the functions.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # This variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from function_catalog import ROWS_BY_NAME, Row, Values, rows  # noqa: E402
from measure import describe_machine  # noqa: E402

from flexsn_codegen import ArgumentError, AutogradError, TraceError, UnsupportedOpError, pointwise  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Relative and absolute tolerances, as in torch.testing.assert_close.
TOLERANCE = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
NEEDED = 0.97
REFUSALS = (UnsupportedOpError, TraceError, ArgumentError, AutogradError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a function in a dtype.

    Attributes:
        verdict: ``"equal"``, ``"close"``, ``"refused"``, ``"wrong"``, ``"crashed"``, or ``"–"`` if eager mode does not
            support the function in the dtype.
        why: text that explains a refusal, a wrong result or another error.
    """

    verdict: str
    why: str = ""

    @property
    def works(self) -> bool:
        return self.verdict in ("equal", "close", "–")


def values(row: Row, call: Callable[..., Any], dtype: torch.dtype, *, wide: bool = False) -> list[Tensor]:
    """Returns the tensors to compare after a call: its results, or the arguments that it wrote to."""
    call_arguments = make_arguments(row, dtype, wide=wide)
    results = call(*call_arguments)
    written = [call_arguments[i] for i in row.writes]
    return [*([] if row.writes else to_tuple(results)), *written]


def gradients(row: Row, call: Callable[..., Any], dtype: torch.dtype, *, wide: bool = False) -> list[Tensor]:
    """Returns the results of a call, and the gradients of a weighted sum of its differentiable results."""
    call_arguments = make_arguments(row, dtype, wide=wide)
    leaves = []
    for value, description in zip(call_arguments, row.arguments, strict=True):
        if isinstance(description, Values) and description.requires_grad and value.is_floating_point():
            leaves.append(value.requires_grad_())
    results = to_tuple(call(*call_arguments))
    roots = [r for r in results if r.requires_grad]
    weights = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64, device=DEVICE) for r in roots]
    weights = [w.reshape(r.shape).to(dtype).to(r.dtype) for w, r in zip(weights, roots, strict=True)]
    grads = torch.autograd.grad(roots, leaves, weights, allow_unused=True)
    grads_or_zeros = [torch.zeros_like(a) if g is None else g for g, a in zip(grads, leaves, strict=True)]
    return [*(r.detach() for r in results), *grads_or_zeros]


def make_arguments(row: Row, dtype: torch.dtype, *, wide: bool) -> list[Any]:
    """Returns the arguments of a call, which have the same values each time. If `wide`, tensors of `dtype` are
    converted to float64.
    """
    generator = torch.Generator().manual_seed(0)
    call_arguments = [a.make(dtype, generator) if isinstance(a, Values) else a for a in row.arguments]
    return [
        (a.double() if wide and a.dtype == dtype else a).to(DEVICE) if isinstance(a, Tensor) else a
        for a in call_arguments
    ]


def to_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def check(row: Row, dtype: torch.dtype, compute: Callable[..., list[Tensor]]) -> Outcome:
    """Checks one function in one dtype. `compute` is either `values` or `gradients`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = compute(row, row.call, dtype)
        except NotImplementedError:
            return Outcome("–")
        try:
            actual = compute(row, pointwise(row.call, autograd=compute is gradients), dtype)
        except REFUSALS as error:
            return Outcome("refused", str(error).splitlines()[0])
        except Exception as error:
            return Outcome("crashed", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        exact = compute(row, row.call, dtype, wide=True)
    if len(actual) != len(expected):
        return Outcome("wrong", f"{len(actual)} results, not {len(expected)}")
    problems = [judge(e, a, x) for e, a, x in zip(expected, actual, exact, strict=True)]
    if any(problems):
        return Outcome("wrong", next(filter(None, problems)))
    is_equal = all(torch.equal(e.double(), a.double()) for e, a in zip(expected, actual, strict=True))
    return Outcome("equal" if is_equal else "close")


def judge(expected: Tensor, actual: Tensor, exact: Tensor) -> str:
    """Describes an error, or returns an empty text if there is no error.

    `exact` is the result of eager mode in float64. An element that is outside the tolerance is no error if it is at
    least as close to `exact` as the element of `expected` is.
    """
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{actual.dtype} {list(actual.shape)}, not {expected.dtype} {list(expected.shape)}"
    if not expected.is_floating_point() or expected.dtype not in TOLERANCE:
        return "" if torch.equal(expected.double(), actual.double()) else "other values"
    relative, absolute = TOLERANCE[expected.dtype]
    wrong = ~torch.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    wrong &= ~((actual.double() - exact).abs() <= (expected.double() - exact).abs())
    if not wrong.any():
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    return f"at {index} {actual[index].item()!r}, not {expected[index].item()!r}"


def main() -> int:
    """Writes the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of functions (default: all)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/functions.md if all run")
    options = parser.parse_args()
    selected = [ROWS_BY_NAME[name] for name in options.names] or rows()
    counts: Counter[str] = Counter()
    lines = []
    for row in selected:
        forward = [check(row, dtype, values) for dtype in DTYPES]
        backward = [check(row, dtype, gradients) for dtype in DTYPES] if row.gradient else []
        both = [*forward, *backward]
        verdicts = {outcome.verdict for outcome in both}
        verdict = next((v for v in ("crashed", "wrong", "refused") if v in verdicts), "works")
        counts[verdict] += 1
        why = next((o.why for o in both if not o.works), "").replace("|", "\\|")
        cells = [row.kind, f"`{row.name}`", *(o.verdict for o in forward)]
        cells += [*(o.verdict for o in backward)] if backward else ["–"] * len(DTYPES)
        lines.append(f"| {' | '.join([*cells, why])} |")
        print(lines[-1], flush=True)
    text = make_page(lines, counts, selected)
    output = options.output or (None if options.names else ROOT / "benchmarks/results/functions.md")
    if output is not None:
        output.write_text(text, encoding="utf-8")
    print(dict(counts))
    return int(bool(counts["wrong"] + counts["crashed"]) or counts["works"] < NEEDED * counts.total())


def make_page(lines: Sequence[str], counts: Counter[str], selected: Sequence[Row]) -> str:
    share = 100 * counts["works"] / max(counts.total(), 1)
    kinds = Counter(row.kind for row in selected)
    tolerances = ", ".join(f"{TOLERANCE[d][0]:g}" for d in DTYPES)
    head = " | ".join(["kind", "function", *(str(d).removeprefix("torch.") for d in DTYPES * 2), "why"])
    return f"""# Functions as users write them, by `pointwise`

Made by `python benchmarks/functions.py` on {describe_machine(DEVICE)} Each function of
`benchmarks/function_catalog.py` runs as one kernel and is compared with eager mode on the same device. Its results, or
the arguments that it writes to, are compared in three dtypes. If the function is differentiable, so are the gradients
of a weighted sum of its results.

Of {counts.total()} functions ({", ".join(f"{n} {kind}" for kind, n in kinds.items())}), {counts["works"]} work in all
dtypes ({share:.1f} %), {counts["refused"]} are refused with a message in at least one dtype, {counts["wrong"]} are
wrong, and {counts["crashed"]} end with another error.

"Equal" means that every bit of every element is equal. "Close" means that a result is within the tolerance of
`torch.testing.assert_close` of eager mode in the same dtype (relative {tolerances}), or no further from eager mode in
float64 than eager mode in that dtype is. "–" means that eager mode does not support the function in this dtype.

| {head} |
|{"---|" * (3 + 2 * len(DTYPES))}
""" + "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
