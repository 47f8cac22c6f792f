"""Comparison of `pointwise` and `FlexSN` with eager mode, on PyTorch's own samples of elementwise ops and their
gradients.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen import UnsupportedOpError, pointwise
from flexsn_nn import FlexSN

pytest.importorskip("expecttest")  # PyTorch's test utilities import it

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import SEED, set_rng_seed
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
DIFFERENTIABLE = DTYPES[:4]
# Elementwise ops that PyTorch does not list as elementwise.
OTHERS = {
    "addcdiv",
    "addcmul",
    "clamp",
    "clone",
    "full_like",
    "lerp",
    "logaddexp2",
    "masked_fill",
    "nn.functional.binary_cross_entropy",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.gelu",
    "nn.functional.hardswish",
    "nn.functional.huber_loss",
    "nn.functional.l1_loss",
    "nn.functional.leaky_relu",
    "nn.functional.mse_loss",
    "nn.functional.kl_div",
    "nn.functional.poisson_nll_loss",
    "nn.functional.smooth_l1_loss",
    "nn.functional.soft_margin_loss",
    "ones_like",
    "where",
    "zeros_like",
}
# Ops that compute with complex numbers, and ops that draw random numbers.
EXCLUDED = {"cdouble", "cfloat", "chalf", "complex", "imag", "nn.functional.rrelu", "polar"}
# Losses. Their samples reduce the result, unless the reduction is turned off.
LOSSES = {name for name in OTHERS if "_loss" in name or "entropy" in name or "kl_div" in name}
# Ops whose results differ from those of eager mode on purpose.
EXCEPTIONS = {
    "special.zeta": "if a term of its sum overflows or z is infinite, eager mode gives NaN; the limit is 0",
    "polygamma": "the gradient is zeta, which differs as well",
    "special.polygamma": "the gradient is zeta, which differs as well",
}
# Ops whose gradients are small differences of values up to 1. In half precision, these gradients are mostly rounding
# error.
CANCELLING = {
    "special.i0e": "eager mode's half `i0e` is off by a unit, and its gradient is a small difference from `i1e`",
}
_SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-40, 1e-4, 88.0, 1e4, -1e30, math.inf, -math.inf, math.nan]
# Relative and absolute tolerances, as in torch.testing.assert_close.
_TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


@dataclass(slots=True)
class Outcome:
    """Outcomes of samples. Each sample is counted once in `equal`, `close`, `refused`, `wrong` or `crashed`.

    Attributes:
        equal: number of samples whose bits equal those of eager mode.
        close: number of samples within the tolerance, or as close to float64 as eager mode.
        refused: number of samples refused with an `UnsupportedOpError`, which names the op.
        reason: first line of the first such error.
        wrong: descriptions of wrong samples.
        crashed: descriptions of samples that raised another error.
        apart: descriptions of samples that only one of `pointwise` and `FlexSN` refuses, or for which their results
            differ.
    """

    equal: int = 0
    close: int = 0
    refused: int = 0
    reason: str = ""
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.equal + self.close + self.refused + len(self.wrong) + len(self.crashed)


def variants() -> list[Any]:
    """Lists all variants of elementwise ops, sorted by name."""
    infos = [o for o in op_db if isinstance(o, UnaryUfuncInfo | BinaryUfuncInfo) or o.name in OTHERS]
    # Jiterator takes CUDA source code, so its ops are left out.
    return sorted((o for o in infos if o.name not in EXCLUDED and "jiterator" not in o.name), key=variant_name)


def variant_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of a variant, with its arguments and keywords. `call` can replace the tensors in both."""

    info: Any
    arguments: Sequence[Any]
    keywords: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [a for a in (*self.arguments, *self.keywords.values()) if isinstance(a, Tensor)]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(*(t.shape for t in self.tensors)))

    def call(self, *values: Tensor) -> Any:
        replacements = iter(values)

        def fill(a: Any) -> Any:
            return next(replacements) if isinstance(a, Tensor) else a

        positional = [fill(a) for a in self.arguments]  # positional arguments come first
        return self.info.op(*positional, **{k: fill(v) for k, v in self.keywords.items()})

    def __str__(self) -> str:
        texts = [f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else repr(a) for a in self.arguments]
        return f"{', '.join(texts)} {self.keywords}"


def check(
    info: Any, dtype: torch.dtype, *, samples: int, special: bool, gradient: bool = False, first: int = 0
) -> Outcome:
    """Runs some samples of a variant, and then, if `special` is True, special values such as infinities and zeros.

    Args:
        samples: number of samples, starting at index `first`. If `first` is too large, only the last sample runs.
        gradient: True to compare gradients in addition to results. Variants without gradients are then skipped.
    """
    outcome = Outcome()
    if gradient and not is_differentiable(info, dtype):
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn_samples = list(itertools.islice(_draw_samples(info, dtype, requires_grad=gradient), first + samples))
        chosen = drawn_samples[first:] or drawn_samples[-1:]
        if special:
            chosen += list(_make_special_samples(dtype, drawn_samples))
        for sample in chosen:
            if sample.tensors and (not gradient or any(t.requires_grad for t in sample.tensors)):
                _compare(sample, _compute_gradients if gradient else _compute_values, outcome)
    return outcome


def is_differentiable(info: Any, dtype: torch.dtype) -> bool:
    return bool(info.supports_autograd and dtype in info.backward_dtypes)


def _draw_samples(info: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Sample]:
    """Yields the samples of `info.sample_inputs`. Unlike that method, this function does not search the stack for the
    current test case, because the search takes as long as the run of a kernel.
    """
    samples = iter(info.sample_inputs_func(info, "cpu", dtype, requires_grad))
    while True:
        set_rng_seed(SEED)
        sample = next(samples, None)
        if sample is None:
            return
        if info.name in LOSSES:
            sample.kwargs["reduction"] = "none"
        yield Sample(info, (sample.input, *sample.args), sample.kwargs)


def _make_special_samples(dtype: torch.dtype, samples: Sequence[Sample]) -> Iterator[Sample]:
    for sample in samples[:1]:
        if "polynomial" in sample.info.name:
            return  # eager mode computes one degree after another, and these values are large degrees
        tensors = [a for a in sample.arguments if isinstance(a, Tensor)]
        if any(t.dtype != dtype for t in sample.tensors) or not 1 <= len(tensors) == len(sample.tensors) <= 2:
            return
        values = _make_special_values(dtype)
        grid = torch.cartesian_prod(values, values) if len(tensors) == 2 else values[:, None]
        columns = iter(c.clone().requires_grad_(t.requires_grad) for c, t in zip(grid.unbind(1), tensors, strict=True))
        arguments = [next(columns) if isinstance(a, Tensor) else a for a in sample.arguments]
        yield Sample(sample.info, arguments, sample.keywords)


def _make_special_values(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    # The smallest number is left out, because eager mode crashes when it divides this number by -1.
    numbers = [1, 2, 3, 7, 8, 100, info.max] + ([-1, -2, -7, info.min + 1] if info.min < 0 else [])
    return torch.tensor(numbers, dtype=dtype)


Function = Callable[..., Any]


def _make_pointwise(sample: Sample) -> Function:
    return pointwise(sample.call, autograd=True, name=f"{variant_name(sample.info)}_sample")


def _make_flexsn(sample: Sample) -> Function:
    """Makes a step without states from the sample, and runs it for one time step."""

    def core(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(r.expand(sample.shape) for r in _as_tuple(sample.call(*values)))

    def run(*values: Tensor) -> list[Tensor]:
        count = len(core(*(v.detach() for v in values)))
        outputs = FlexSN(core, len(values), 0, count, backend="triton")(*(v.unsqueeze(0) for v in values))
        return [o.squeeze(0) for o in _as_tuple(outputs)]

    return run


def _compute_values(sample: Sample, function: Function, *, wide: bool = False) -> list[Tensor]:
    results = function(*(_copy(t, wide=wide) for t in sample.tensors))
    return [r.expand(sample.shape) for r in _as_tuple(results)]


def _compute_gradients(sample: Sample, function: Function, *, wide: bool = False) -> list[Tensor]:
    required = [t.requires_grad for t in sample.tensors]
    leaves = [
        _copy(t, wide=wide).requires_grad_(requires_grad)
        for t, requires_grad in zip(sample.tensors, required, strict=True)
    ]
    required_leaves = [leaf for leaf, requires_grad in zip(leaves, required, strict=True) if requires_grad]
    results = [r.expand(sample.shape) for r in _as_tuple(function(*leaves))]
    roots = [r for r in results if r.requires_grad]
    if not roots:
        return []
    weights = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in roots]
    gradients_or_none = torch.autograd.grad(roots, required_leaves, weights, allow_unused=True)
    gradients = [
        torch.zeros_like(a) if g is None else g for g, a in zip(gradients_or_none, required_leaves, strict=True)
    ]
    return [*(r.detach() for r in results), *gradients]


def _compare(sample: Sample, compute: Callable[..., list[Tensor]], outcome: Outcome) -> None:
    """Compares a sample in `pointwise` and in `FlexSN` with eager mode. The worse of the two outcomes counts."""
    try:
        expected = compute(sample, sample.call)
    except (RuntimeError, NotImplementedError, ZeroDivisionError):
        return  # eager mode refuses the sample
    runs: list[list[Tensor] | Exception] = []
    for make_function in (_make_pointwise, _make_flexsn):
        try:
            runs.append(compute(sample, make_function(sample)))
        except Exception as error:
            runs.append(error)
    refusals = [f for f in runs if isinstance(f, UnsupportedOpError)]
    errors = [f for f in runs if isinstance(f, Exception) and not isinstance(f, UnsupportedOpError)]
    results = [f for f in runs if not isinstance(f, Exception)]
    if len(refusals) == 1 or (len(results) == 2 and not _results_agree(*results)):
        outcome.apart.append(f"{variant_name(sample.info)}, {sample}: {runs}")
    if errors:
        outcome.crashed.append(f"{type(errors[0]).__name__}: {errors[0]} for {sample}")
        return
    if refusals:
        outcome.refused += 1
        outcome.reason = outcome.reason or str(refusals[0]).splitlines()[0]
        return
    problems = [p for actual in results if (p := _describe_problem(sample, compute, expected, actual))]
    if problems:
        outcome.wrong.append(f"{problems[0]} for {sample}")
    elif all(_are_equal(e, a) for actual in results for e, a in zip(expected, actual, strict=True)):
        outcome.equal += 1
    else:
        outcome.close += 1


def _results_agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Returns True if the results agree. Gradients may differ by the rounding of a division."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and bool(_are_close(a, b).all())
        for a, b in zip(first, second, strict=True)
    )


def _describe_problem(
    sample: Sample, compute: Callable[..., list[Tensor]], expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> str:
    """Describes the first wrong result. Returns an empty text if all results are right."""
    if len(expected) != len(actual):
        return f"{len(actual)} results, not {len(expected)}"
    pairs = list(zip(expected, actual, strict=True))
    problems = [_judge(e, a) for e, a in pairs]
    if any(problems):
        # Eager mode's float32 results may be wrong themselves: in vectors of 16 elements, gelu(inf) is NaN.
        try:
            exact = compute(sample, sample.call, wide=True)
        except (RuntimeError, ZeroDivisionError):
            exact = list(expected)
        scale = 1.0 if sample.info.name in CANCELLING else 0.0
        is_exception = sample.info.name in EXCEPTIONS
        problems = [
            _judge(e, a, x, accepts_nan=is_exception, scale=scale) for (e, a), x in zip(pairs, exact, strict=True)
        ]
    return next(filter(None, problems), "")


def _copy(tensor: Tensor, *, wide: bool) -> Tensor:
    copy = tensor.detach().clone()
    return copy.double() if wide and copy.is_floating_point() else copy


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _are_equal(expected: Tensor, actual: Tensor) -> bool:
    return bool(((expected == actual) | ((expected != expected) & (actual != actual))).all())


def _judge(
    expected: Tensor,
    actual: Tensor,
    exact: Tensor | None = None,
    *,
    accepts_nan: bool = False,
    scale: float = 0.0,
) -> str:
    """Describes a wrong element. Returns an empty text if all elements are right.

    An element is right if it is close to `expected` or to `exact`, or as close to `exact` as `expected` is. If results
    are small differences of large values, `scale` is the size of these values, and tolerances are relative to it.
    """
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{actual.dtype} {list(actual.shape)}, not {expected.dtype} {list(expected.shape)}"
    wrong = ~_are_close(actual, expected, scale)
    if exact is not None:
        wrong &= ~_are_close(actual, exact.to(expected.dtype), scale)
        # Elements are also right if they are as close to the exact value as the elements of eager mode.
        wrong &= ~((actual.double() - exact).abs() <= (expected.double() - exact).abs())
    if accepts_nan and expected.is_floating_point():
        wrong &= ~expected.isnan()
    if not wrong.any():
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    return f"at {index} {actual[index].item()!r}, not {expected[index].item()!r}"


def _are_close(actual: Tensor, expected: Tensor, scale: float = 0.0) -> Tensor:
    if not expected.is_floating_point():
        return actual == expected
    relative, absolute = _TOLERANCE[expected.dtype]
    return torch.isclose(actual, expected, rtol=relative, atol=absolute + relative * scale, equal_nan=True)
