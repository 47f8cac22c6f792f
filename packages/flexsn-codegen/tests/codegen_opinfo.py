"""PyTorch's own samples of its elementwise ops and their gradients: a pointwise kernel against eager mode."""

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

pytest.importorskip("expecttest")  # PyTorch's test utilities need it

from torch.testing._internal.common_methods_invocations import op_db
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
# Elementwise ops that PyTorch lists among the others.
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
# They are samples of a reduction, unless it is turned off.
LOSSES = {name for name in OTHERS if "_loss" in name or "entropy" in name or "kl_div" in name}
# What the two differ in on purpose.
EXCEPTIONS = {
    "special.zeta": "eager mode gives NaN where a term of its sum overflows or z is infinite; the limit is 0",
    "polygamma": "the gradient is a zeta function",
    "special.polygamma": "the gradient is a zeta function",
}
# Gradients that are small differences of values up to 1: what is left of half ones is their rounding error.
CANCELLING = {
    "special.i0e": "eager mode's half `i0e` is off by a unit, and its gradient is a small difference from `i1e`",
}
_SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-40, 1e-4, 88.0, 1e4, -1e30, math.inf, -math.inf, math.nan]
# Relative and absolute, as torch.testing.assert_close.
_TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


@dataclass(slots=True)
class Outcome:
    """What came of the samples of one variant in one dtype.

    Attributes:
        equal: samples with eager mode's bits.
        close: samples within the tolerance of eager mode, or of eager mode in float64 rounded once.
        refused: the error, if there was one.
        wrong: what was wrong, for each other sample.
    """

    equal: int = 0
    close: int = 0
    refused: str = ""
    wrong: list[str] = field(default_factory=list)


def variants() -> list[Any]:
    """All elementwise variants, by name."""
    found = [o for o in op_db if isinstance(o, UnaryUfuncInfo | BinaryUfuncInfo) or o.name in OTHERS]
    # Jiterator takes the source of a CUDA kernel.
    return sorted((o for o in found if "jiterator" not in o.name), key=variant_name)


def variant_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of a variant: `arguments` and `keywords` with their tensors, which `call` takes anew."""

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
        given = iter(values)

        def fill(a: Any) -> Any:
            return next(given) if isinstance(a, Tensor) else a

        positional = [fill(a) for a in self.arguments]  # before the others
        return self.info.op(*positional, **{k: fill(v) for k, v in self.keywords.items()})

    def __str__(self) -> str:
        shown = [f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else repr(a) for a in self.arguments]
        return f"{', '.join(shown)} {self.keywords}"


def check(info: Any, dtype: torch.dtype, *, samples: int, special: bool) -> Outcome:
    """Runs up to `samples` of the variant's samples, then special values."""
    return _check(info, dtype, samples, special, _check_forward)


def check_gradient(info: Any, dtype: torch.dtype, *, samples: int, special: bool) -> Outcome:
    """The same for the gradients, and the results with them; nothing, where PyTorch says that there are none."""
    if not is_differentiable(info, dtype):
        return Outcome()
    return _check(info, dtype, samples, special, _check_backward)


def is_differentiable(info: Any, dtype: torch.dtype) -> bool:
    return bool(info.supports_autograd and dtype in info.backward_dtypes)


def _check(
    info: Any, dtype: torch.dtype, samples: int, special: bool, check_one: Callable[[Sample, Outcome], None]
) -> Outcome:
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(itertools.islice(_samples(info, dtype, requires_grad=check_one is _check_backward), samples))
        if special:
            given += list(_special_samples(dtype, given))
        for sample in given:
            check_one(sample, outcome)
    return outcome


def _samples(info: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Sample]:
    for sample in info.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        if info.name in LOSSES:
            sample.kwargs["reduction"] = "none"
        yield Sample(info, (sample.input, *sample.args), sample.kwargs)


def _special_samples(dtype: torch.dtype, given: Sequence[Sample]) -> Iterator[Sample]:
    for sample in given[:1]:
        if "polynomial" in sample.info.name:
            return  # eager mode takes as many steps as the largest degree
        tensors = [a for a in sample.arguments if isinstance(a, Tensor)]
        if any(t.dtype != dtype for t in sample.tensors) or not 1 <= len(tensors) == len(sample.tensors) <= 2:
            return
        values = _special_values(dtype)
        grid = torch.cartesian_prod(values, values) if len(tensors) == 2 else values[:, None]
        columns = iter(c.clone().requires_grad_(t.requires_grad) for c, t in zip(grid.unbind(1), tensors, strict=True))
        arguments = [next(columns) if isinstance(a, Tensor) else a for a in sample.arguments]
        yield Sample(sample.info, arguments, sample.keywords)


def _special_values(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    # Not the smallest one: divided by -1, it ends the process in eager mode.
    numbers = [1, 2, 3, 7, 8, 100, info.max] + ([-1, -2, -7, info.min + 1] if info.min < 0 else [])
    return torch.tensor(numbers, dtype=dtype)


def _check_forward(sample: Sample, outcome: Outcome) -> None:
    def compute(function: Callable[..., Any], *, wide: bool = False) -> list[Tensor]:
        results = function(*(_copy(t, wide=wide) for t in sample.tensors))
        return [r.expand(sample.shape) for r in _as_tuple(results)]

    _compare(sample, compute, outcome)


def _check_backward(sample: Sample, outcome: Outcome) -> None:
    wanted = [t.requires_grad for t in sample.tensors]

    def compute(function: Callable[..., Any], *, wide: bool = False) -> list[Tensor]:
        leaves = [_copy(t, wide=wide).requires_grad_(want) for t, want in zip(sample.tensors, wanted, strict=True)]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        results = [r.expand(sample.shape) for r in _as_tuple(function(*leaves))]
        roots = [r for r in results if r.requires_grad]
        if not roots:
            return []
        weights = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in roots]
        found = torch.autograd.grad(roots, asked, weights, allow_unused=True)
        gradients = [torch.zeros_like(a) if g is None else g for g, a in zip(found, asked, strict=True)]
        return [*(r.detach() for r in results), *gradients]

    if any(wanted):
        _compare(sample, compute, outcome)


def _compare(sample: Sample, compute: Callable[..., list[Tensor]], outcome: Outcome) -> None:
    info = sample.info
    try:
        expected = compute(sample.call)
    except (RuntimeError, NotImplementedError, ZeroDivisionError):
        return  # eager mode refuses
    try:
        actual = compute(pointwise(sample.call, autograd=True, name=f"{variant_name(info)}_sample"))
    except UnsupportedOpError as error:
        outcome.refused = str(error).splitlines()[0]
        return
    if not expected and not actual:
        return
    pairs = list(zip(expected, actual, strict=True))
    problems = [_judge(e, a) for e, a in pairs]
    if any(problems):
        # Eager mode's float32 code has errors of its own (gelu(inf) is NaN in vectors of 16).
        try:
            exact = compute(sample.call, wide=True)
        except (RuntimeError, ZeroDivisionError):
            exact = expected
        scale = 1.0 if info.name in CANCELLING else 0.0
        problems = [
            _judge(e, a, x, nan_is_free=info.name in EXCEPTIONS, scale=scale)
            for (e, a), x in zip(pairs, exact, strict=True)
        ]
    if any(problems):
        outcome.wrong.append(f"{next(filter(None, problems))} for {sample}")
    elif all(_same(e, a) for e, a in pairs):
        outcome.equal += 1
    else:
        outcome.close += 1


def _copy(tensor: Tensor, *, wide: bool) -> Tensor:
    copy = tensor.detach().clone()
    return copy.double() if wide and copy.is_floating_point() else copy


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _same(expected: Tensor, actual: Tensor) -> bool:
    return bool(((expected == actual) | ((expected != expected) & (actual != actual))).all())


def _judge(
    expected: Tensor,
    actual: Tensor,
    exact: Tensor | None = None,
    *,
    nan_is_free: bool = False,
    scale: float = 0.0,
) -> str:
    """What is wrong, if anything; an element may equal `exact`, rounded, instead of `expected`.

    `scale`: the values of which the results are differences; they count as close relative to it.
    """
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{actual.dtype} {list(actual.shape)}, not {expected.dtype} {list(expected.shape)}"
    wrong = ~_close(actual, expected, scale)
    if exact is not None:
        wrong &= ~_close(actual, exact.to(expected.dtype), scale)
    if nan_is_free and expected.is_floating_point():
        wrong &= ~expected.isnan()
    if not wrong.any():
        return ""
    where = tuple(wrong.nonzero()[0].tolist())
    return f"at {where} {actual[where].item()!r}, not {expected[where].item()!r}"


def _close(actual: Tensor, expected: Tensor, scale: float = 0.0) -> Tensor:
    if not expected.is_floating_point():
        return actual == expected
    relative, absolute = _TOLERANCE[expected.dtype]
    return torch.isclose(actual, expected, rtol=relative, atol=absolute + relative * scale, equal_nan=True)
