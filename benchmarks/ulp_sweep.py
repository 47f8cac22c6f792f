"""Table of errors of every rule of flexsn-codegen, compared with eager mode, in units in the last place.

    python benchmarks/ulp_sweep.py [--cpp] [--output FILE] [--quick] [--stride N] [--jobs N] [--only TEXT ...]

The script runs on the GPU. Without a GPU, it runs in Triton's interpreter and compares with eager mode on the CPU.
`--quick` tests fewer arguments. `--cpp` tests the rules in C++ on the CPU, with fewer arguments. `--stride 1` tests all
float32 numbers. Each job is a separate process, because compilation takes most of the time. The exit status is 1 if a
case fails, or if an error exceeds its limit and `EXCEPTIONS` or `CPP_EXCEPTIONS` gives no reason for it.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from pathlib import Path

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # This variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "benchmarks", "packages/flexsn-codegen/tests")]

from cpp_library import COMPILER, Library  # noqa: E402
from measure import describe_machine  # noqa: E402
from ulp_cases import FULL, QUICK, SOME, Case, Function, Size, cases, chunks  # noqa: E402
from ulp_distance import NOT_A_NUMBER, ulp_distance, zero_signs_differ  # noqa: E402

from flexsn_codegen import UnsupportedOpError, pointwise  # noqa: E402

_BESSEL_JY = (
    "eager mode reduces large arguments with a rounded multiple of pi. Above 2^24 in float32 and 2^53 in float64, "
    "even the sign of its result is wrong (J0(9007199254772456) is 3.217027543546835e-09). Near roots, few of its "
    "digits are right. At infinity, it gives NaN, but the limit is 0"
)
_BESSEL_I = (
    "eager mode multiplies with exp(abs(x)), which overflows earlier than the product, and gives NaN at infinity. At "
    "the worst arguments in float64, the error of its series is 7 ulp, and the error of ours is 2 ulp. I1(-0) is -0"
)
_BESSEL_K = (
    "at the worst arguments in float64, the error of eager mode's series is 15 ulp, and the error of ours is 4 ulp "
    "(K0(1.4616321449612955) is 0.22474822127557867). For the smallest denormals, eager mode gives infinity or NaN, "
    "because x / 2 is 0"
)
_DIGAMMA = (
    "the sum of eager mode, rounded at other steps. Near the roots, the result is a small difference of large terms, "
    "which is mostly rounding error in both"
)
_ZETA = (
    "the sum of eager mode, rounded at other steps. For negative arguments, terms cancel. If a term overflows or z is "
    "infinite, eager mode gives NaN, and ours gives the limit. If the first term is large, eager mode omits "
    "1 / (s - 1)"
)
_POLYGAMMA = (
    "the result is a multiple of zeta, and has the same errors. At infinity, eager mode gives NaN, and ours gives 0"
)
_IGAMMA = (
    "igamma and igammac are sums of hundreds of terms. Eager mode ends its sums at other terms, and changes the method "
    "at other arguments. In the tails, one of the two functions is 1, and the other is a difference or an exponential "
    "with few correct digits"
)
# Reasons why an error exceeds the limit, by case, or by case and dtype. Roots and limits were computed with mpmath, to
# 40 digits.
EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(("bessel_j0", "bessel_j1", "special_bessel_y0", "special_bessel_y1"), _BESSEL_JY),
    **dict.fromkeys(("bessel_i0", "bessel_i1", "bessel_i0e", "bessel_i1e"), _BESSEL_I),
    **dict.fromkeys(("special_modified_bessel_i0", "special_modified_bessel_i1"), _BESSEL_I),
    **dict.fromkeys(("special_modified_bessel_k0", "special_modified_bessel_k1"), _BESSEL_K),
    **dict.fromkeys(("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"), _BESSEL_K),
    "asinh float64": "the error is 1 ulp, and eager mode's is 2 ulp in the other direction",
    **dict.fromkeys(("digamma", "polygamma 0"), _DIGAMMA),
    "erfcx": "eager mode rounds x^2 before exp(x^2), so that its error is x^2 / 2 ulp",
    "ndtri float64": "the error of libdevice is 6 ulp, and eager mode's is 2 ulp",
    "ndtri float32": "the error of eager mode is 4 ulp",
    "polygamma 1": "the few terms of eager mode's series, rounded at other steps",
    **dict.fromkeys(("polygamma 2", "polygamma 3", "polygamma 4"), _POLYGAMMA),
    "zeta": _ZETA,
    **dict.fromkeys(("igamma", "igammac"), _IGAMMA),
}
_NEAREST = "eager mode's square root (of MKL) is off by 1 ulp for a sixth of all numbers; ours is exact"
_FMOD = "eager mode's vectors call SLEEF. If the quotient is large, SLEEF rounds or gives NaN; ours is exact"
_OR_NAN = "eager mode may return a signalling NaN. For 0 and -0, it returns the first argument"
_EARLY = "eager mode's result is infinite for some arguments whose true value is finite"
_IN_HALVES = "the error is in eager mode: ours differs from eager mode in float64 by at most 1 ulp"
_NO_ROOT = "for float16, eager mode calls pow, which has other limits at -0 and -infinity"
# Reasons why errors of rules in C++ exceed the limit. These rules are compared with eager mode on the CPU.
CPP_EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(("sqrt", "pow by the number 0.5"), _NEAREST),
    **dict.fromkeys(("pow by the number 0.5 float16", "pow by the number -0.5 float16"), _NO_ROOT),
    **dict.fromkeys(("fmod", "remainder"), _FMOD),
    **dict.fromkeys(("fmax", "fmin"), _OR_NAN),
    **dict.fromkeys(("sinh", "cosh"), _EARLY),
    **{
        f"{name} {half}": _IN_HALVES
        for name in ("erf", "polygamma 2", "polygamma 3", "polygamma 4")
        for half in ("float16", "bfloat16")
    },
    "lgamma": "near negative roots, eager mode's result (of SLEEF) has no correct digit, and it overflows too early",
    "igamma": (
        "torch's own function, with products and sums that eager mode fuses. If x is slightly larger than a, the "
        "result is 1 minus the other function, with an error of up to 27 ulp in eager mode and 15 ulp in kernels. For "
        "huge arguments, eager mode gives NaN, and ours gives the limit 1"
    ),
    "special_bessel_y1": (
        "torch's own function, with one product that is rounded at another step. Near roots, the result is a small "
        "difference of large terms, which is mostly rounding error in both"
    ),
}
# Exceptions whose results in float32, float16 and bfloat16 must be within the limit of eager mode in float64 instead.
_ACCURATE = {
    *("bessel_i0", "bessel_i1", "bessel_i0e", "bessel_i1e", "erfcx", "ndtri"),
    *("special_modified_bessel_i0", "special_modified_bessel_i1"),
    *("special_modified_bessel_k0", "special_modified_bessel_k1"),
    *("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
}


@dataclass(slots=True)
class Row:
    """Result of one case in one dtype.

    Attributes:
        limit: allowed error in ulp.
        left_out: description of the arguments that count, or an empty text if all arguments count.
        values: number of results that are compared.
        differ: number of results whose bits differ. All NaNs are equal.
        ulp: largest distance in ulp, without NaN.
        worst: text with the arguments of this distance, and the two results.
        nan: number of results that are NaN either here or in eager mode, but not in both.
        nan_at: text with the first arguments of such a result, and the two results.
        zero: number of results that are zero both here and in eager mode, with different signs.
        zero_at: text with the first arguments of such a result, and the two results.
        off: largest distance of this project's results, and of eager mode's results, from eager mode in float64, after
            the results in float64 are rounded to the dtype.
        skipped: reason why the case was not measured, or an empty text.
        failed: error that prevented the measurement, or an empty text.
        seconds: duration of the measurement.
        cpp: True for the rule in C++.
    """

    name: str
    dtype: str
    limit: int
    left_out: str = ""
    values: int = 0
    differ: int = 0
    ulp: int = 0
    worst: str = ""
    nan: int = 0
    nan_at: str = ""
    zero: int = 0
    zero_at: str = ""
    off: tuple[int, int] | None = None
    skipped: str = ""
    failed: str = ""
    seconds: float = 0.0
    cpp: bool = False

    @property
    def over(self) -> bool:
        return bool(self.ulp > self.limit or self.nan or self.zero)

    @property
    def reason(self) -> str:
        """Reason for an error above the limit. It is empty if no reason is listed, or if the listed reason does not
        hold.
        """
        if self.name in _ACCURATE and self.dtype != "float64" and (self.off is None or self.off[0] > self.limit):
            return ""
        reasons = CPP_EXCEPTIONS if self.cpp else EXCEPTIONS
        return reasons.get(f"{self.name} {self.dtype}") or reasons.get(self.name, "")


@functools.cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in cases()[0]}


def measure(
    name: str, dtype: torch.dtype, size: Size, device: torch.device = DEVICE, kernel: Function | str = ""
) -> Row:
    """Runs one case in one dtype, and returns its row of the table.

    Args:
        kernel: function in C++, or the reason why there is no such function. If it is empty, the function in Triton is
            measured.
    """
    begun = time.perf_counter()
    case = _cases()[name]
    row = Row(name, str(dtype).removeprefix("torch."), case.limit, case.why_keep, cpp=bool(kernel))
    try:
        if kernel and isinstance(kernel, str):
            row.skipped = kernel
        else:
            row.skipped = _fill_row(row, case, kernel or pointwise(case.function, name=case.name), dtype, size, device)
    except Exception as error:
        # All other cases still run.
        row.failed = f"{type(error).__name__}: {_first_line(error)}"
    row.seconds = time.perf_counter() - begun
    return row


def compile_cpp(tasks: Sequence[tuple[str, torch.dtype]]) -> dict[tuple[str, torch.dtype], Function | str]:
    """Compiles the C++ functions of the cases together. Returns the function of each case, or the reason why the case
    has no function.
    """
    library = Library()
    kernels: dict[tuple[str, torch.dtype], Function | str] = {}
    for name, dtype in tasks:
        case, label = _cases()[name], f"{name} {dtype}"
        try:
            library.add(label, case.function, *[dtype] * case.arity)
            kernels[name, dtype] = functools.partial(library.call, label)
        except (UnsupportedOpError, RuntimeError) as error:
            kernels[name, dtype] = f"no code for this function: {_first_line(error)}"
    with tempfile.TemporaryDirectory() as folder:
        library.compile(Path(folder))
    return kernels


def _fill_row(row: Row, case: Case, kernel: Function, dtype: torch.dtype, size: Size, device: torch.device) -> str:
    """Adds the counts of a case to the row. Returns the reason if the case cannot run, otherwise an empty text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for arguments in chunks(case, dtype, size, device):
            try:
                expected = _list_results(case.function(*arguments))
            except (RuntimeError, NotImplementedError) as error:
                return f"eager mode refuses: {_first_line(error)}"
            try:
                actual = _list_results(kernel(*arguments))
            except UnsupportedOpError as error:
                return f"the rule refuses: {_first_line(error)}"
            exact = _compute_in_float64(case, arguments) if case.limit and dtype != torch.float64 else None
            for index, (ours, eagers) in enumerate(zip(actual, expected, strict=True)):
                _compare(row, arguments, ours, eagers, None if exact is None else exact[index])
    return ""


def _list_results(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].replace("|", "\\|")


def _compute_in_float64(case: Case, arguments: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    try:
        return _list_results(case.function(*(t.double() if t.is_floating_point() else t for t in arguments)))
    except RuntimeError:
        return None


def _compare(row: Row, arguments: Sequence[Tensor], ours: Tensor, eagers: Tensor, exact: Tensor | None) -> None:
    if ours.dtype != eagers.dtype:
        raise AssertionError(f"{row.name} on {row.dtype}: {ours.dtype}, and eager mode {eagers.dtype}")
    distance, zero = ulp_distance(ours, eagers), zero_signs_differ(ours, eagers)
    nan = distance == NOT_A_NUMBER
    distance = distance.masked_fill(nan, 0)

    def describe_position(position: Tensor) -> str:
        inputs = ", ".join(_format_value(t[position]) for t in arguments)
        return f"{inputs}: {_format_value(ours[position])}, eager {_format_value(eagers[position])}"

    row.values += ours.numel()
    row.differ += int(((distance > 0) | zero | nan).sum())
    largest = int(distance.max())
    if largest > row.ulp:
        row.ulp, row.worst = largest, describe_position(distance.argmax())
    if not row.nan and nan.any():
        row.nan_at = describe_position(nan.int().argmax())
    if not row.zero and zero.any():
        row.zero_at = describe_position(zero.int().argmax())
    row.nan += int(nan.sum())
    row.zero += int(zero.sum())
    if exact is not None:
        rounded = exact.to(ours.dtype)
        off = tuple(_find_largest(ulp_distance(t, rounded)) for t in (ours, eagers))
        before = row.off or (0, 0)
        row.off = (max(off[0], before[0]), max(off[1], before[1]))


def _find_largest(distance: Tensor) -> int:
    return int(distance.masked_fill(distance == NOT_A_NUMBER, 0).max())


def _format_value(value: Tensor) -> str:
    number = value.item()
    return f"{number:.9g}" if isinstance(number, float) and value.dtype != torch.float64 else repr(number)


# -- the page ------------------------------------------------------------------------------------------------


def page(rows: Sequence[Row], uncovered: dict[str, str], description: str, seconds: float) -> str:
    measured_rows = [row for row in rows if not row.skipped and not row.failed]
    failed = [row for row in rows if row.failed]
    exceeding = [row for row in measured_rows if row.over]
    unexplained = [row for row in exceeding if not row.reason]
    cpp = bool(rows) and rows[0].cpp
    machine = f"CPU, {Path(COMPILER or '').name}, torch {torch.__version__}." if cpp else describe_machine(DEVICE)
    lines = [
        "# The rules of flexsn-codegen against eager mode, in ulp",
        "",
        f"`python benchmarks/ulp_sweep.py{' --cpp' if cpp else ''}`: " + description,
        f"{machine} {seconds:.0f} s.",
        "",
        "A distance of 1 ulp is the distance to the neighbouring number of the dtype, including denormal numbers.",
        "Zeros of different signs (`zero`) and results that are NaN on only one side (`NaN`) are counted separately.",
        "Arithmetic, comparison and selection must be exact; other functions may differ by 2. `off float64` shows the",
        "distance of this project's result, and of eager mode's result, from the rounded result of eager mode in",
        "float64. If both distances are large, eager mode is inaccurate.",
        "",
        *(_FUSED if cpp else []),
        f"{len({row.name for row in rows})} functions in {len(measured_rows)} combinations with a dtype, "
        f"{sum(r.values for r in measured_rows):,} results: "
        f"{sum(not r.differ for r in measured_rows)} combinations are equal to the last bit, "
        f"{len(measured_rows) - len(exceeding)} are within their limit, "
        f"{len(exceeding) - len(unexplained)} are named exceptions, "
        f"{len(unexplained)} are over without a reason. {len(failed)} failed.",
        "",
        *(f"- **failed**: {row.name} {row.dtype}: {row.failed}" for row in failed),
        *([""] if failed else []),
        *_format_exceptions(exceeding),
        "## Different in some bits",
        "",
        "| function | dtype | results | differ | ulp | may | off float64: ours, eager | NaN | zero | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_format_row(row) for row in measured_rows if row.differ),
        "",
        "## Equal to the last bit",
        "",
        "| function | dtypes | results | left out |",
        "|---|---|---|---|",
        *_format_equal(row for row in measured_rows if not row.differ),
        "",
        "## Not run",
        "",
        "| function | dtypes | why |",
        "|---|---|---|",
        *_format_skipped(row for row in rows if row.skipped),
        *(f"| `{op}` | all | {why} |" for op, why in uncovered.items()),
        "",
    ]
    return "\n".join(lines)


# Remarks about several functions. They are not in the table, because each of its rows is about a single function.
_FUSED = [
    "`lerp`, `addcmul`, and `add` and `sub` with `alpha` multiply and add. In vectors, eager mode uses a fused",
    "multiply-add instruction if the processor has one, and rounds once. Kernels also round the product. If the sum",
    "cancels, the difference is many ulp of the small result, but at most half an ulp of the product. `addcdiv` is",
    "bitwise equal to eager mode.",
    "",
]


def _format_exceptions(exceeding: Sequence[Row]) -> list[str]:
    if not exceeding:
        return []
    lines = ["## Over the limit", "", "| function | dtypes | why |", "|---|---|---|"]
    for (name, reason), dtypes in _group_dtypes(((row.name, row.reason or "**not known**"), row) for row in exceeding):
        lines.append(f"| {name} | {dtypes} | {reason} |")
    return [*lines, ""]


def _group_dtypes(rows: Iterable[tuple[tuple[str, str], Row]]) -> list[tuple[tuple[str, str], str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key, row in rows:
        groups.setdefault(key, []).append(row.dtype)
    return [(key, ", ".join(dtypes)) for key, dtypes in groups.items()]


def _format_row(row: Row) -> str:
    off = "" if row.off is None else f"{row.off[0]}, {row.off[1]}"
    mark = "" if not row.over else " (exception)" if row.reason else " **over**"
    worst = "; ".join(filter(None, (row.worst, row.nan_at, row.zero_at)))
    cells = (row.name, row.dtype, f"{row.values:,}", f"{row.differ:,}", f"{row.ulp:,}{mark}", row.limit, off)
    return f"| {' | '.join(map(str, cells))} | {row.nan or ''} | {row.zero or ''} | {worst} |"


def _format_equal(rows: Iterable[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    return [
        f"| {name} | {', '.join(r.dtype for r in rows_of_function)} | {sum(r.values for r in rows_of_function):,} | "
        f"{'counted: ' if rows_of_function[0].left_out else ''}{rows_of_function[0].left_out} |"
        for name, rows_of_function in groups.items()
    ]


def _format_skipped(rows: Iterable[Row]) -> list[str]:
    grouped = _group_dtypes(((row.name, row.skipped.replace(row.dtype, "T")), row) for row in rows)
    return [f"| {name} | {dtypes} | {why} |" for (name, why), dtypes in grouped]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpp", action="store_true", help="test the rules in C++")
    parser.add_argument("--output", type=Path, help="default: a file in benchmarks/results if all cases run")
    parser.add_argument("--quick", action="store_true", help="test few arguments")
    parser.add_argument("--stride", type=int, help=f"stride of the float32 bit patterns (default: {FULL.stride})")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes")
    parser.add_argument(
        "--limit", type=float, default=400.0, help="seconds after which the page is written with the results so far"
    )
    parser.add_argument("--only", nargs="*", default=[], help="only cases whose names contain one of these texts")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else SOME if options.cpp else FULL
    if options.stride:
        size = replace(size, stride=options.stride)
    begun = time.perf_counter()
    tasks = [
        (case.name, dtype)
        for case in _cases().values()
        for dtype in case.dtypes
        if not options.only or any(text in case.name for text in options.only)
    ]
    if options.cpp:
        tasks = [(name, dtype) for name, dtype in tasks if "fast" not in name]
        cpu = torch.device("cpu")
        rows = [measure(name, dtype, size, cpu, kernel) for (name, dtype), kernel in compile_cpp(tasks).items()]
    else:
        rows = _run(tasks, size, options.jobs, options.limit)
    description = (
        f"all float16 and bfloat16 numbers, every {size.stride}th float32 number, the {size.window} nearest numbers on "
        f"each side of the numbers at which functions change, and {size.random} random numbers from each of three "
        "distributions."
    )
    text = page(rows, cases()[1], description, time.perf_counter() - begun)
    output = options.output or (
        None if options.only or options.quick else ROOT / f"benchmarks/results/ulp{'_cpp' if options.cpp else ''}.md"
    )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    print(text)
    slow = sorted(rows, key=lambda row: -row.seconds)[:5]
    print("slowest:", ", ".join(f"{row.name} {row.dtype} {row.seconds:.1f} s" for row in slow))
    return int(any(row.failed or (row.over and not row.reason) for row in rows))


def _run(tasks: Sequence[tuple[str, torch.dtype]], size: Size, jobs: int, limit: float) -> list[Row]:
    if jobs == 1:
        return [measure(name, dtype, size) for name, dtype in tasks]
    end = time.monotonic() + limit
    # `Pool.__exit__` calls `terminate`, so that a process that hangs does not block this process.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pending = [pool.apply_async(measure, (name, dtype, size)) for name, dtype in tasks]
        return [_await_row(p, name, dtype, end) for p, (name, dtype) in zip(pending, tasks, strict=True)]


def _await_row(pending: AsyncResult[Row], name: str, dtype: torch.dtype, end: float) -> Row:
    try:
        return pending.get(max(0.0, end - time.monotonic()))
    except multiprocessing.TimeoutError:
        return Row(name, str(dtype).removeprefix("torch."), 0, failed="no result in time")


if __name__ == "__main__":
    sys.exit(main())
