"""PyTorch's own samples of its elementwise ops, through a pointwise kernel and through eager mode."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

from flexsn_codegen import UnsupportedOpError, pointwise

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


def check(info: Any, dtype: torch.dtype, *, samples: int, special: bool) -> Outcome:
    """Runs up to `samples` of the variant's samples, then special values."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(itertools.islice(_samples(info, dtype), samples))
        if special:
            given += list(_special_samples(info, dtype, given))
        for arguments in given:
            _check_one(info, arguments, outcome)
    return outcome


def _samples(info: Any, dtype: torch.dtype) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        if info.name in LOSSES:
            sample.kwargs["reduction"] = "none"
        yield (sample.input, *sample.args), sample.kwargs


def _special_samples(
    info: Any, dtype: torch.dtype, given: Sequence[tuple[Sequence[Any], dict[str, Any]]]
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    if "polynomial" in info.name:
        return  # eager mode takes as many steps as the largest degree
    values = _special_values(dtype)
    for arguments, keywords in given[:1]:
        count = sum(isinstance(a, Tensor) and a.dtype == dtype for a in arguments)
        if any(isinstance(a, Tensor) and a.dtype != dtype for a in arguments) or not 1 <= count <= 2:
            return
        if any(isinstance(a, Tensor) for a in keywords.values()):
            return
        grid = torch.cartesian_prod(values, values) if count == 2 else values[:, None]
        columns = iter(grid.unbind(1))
        yield [next(columns) if isinstance(a, Tensor) else a for a in arguments], keywords


def _special_values(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    # Not the smallest one: divided by -1, it ends the process in eager mode.
    numbers = [1, 2, 3, 7, 8, 100, info.max] + ([-1, -2, -7, info.min + 1] if info.min < 0 else [])
    return torch.tensor(numbers, dtype=dtype)


def _check_one(info: Any, sample: tuple[Sequence[Any], dict[str, Any]], outcome: Outcome) -> None:
    arguments, keywords = sample
    tensors = [a for a in (*arguments, *keywords.values()) if isinstance(a, Tensor)]

    def call(*values: Tensor) -> Any:
        given = iter(values)

        def fill(a: Any) -> Any:
            return next(given) if isinstance(a, Tensor) else a

        positional = [fill(a) for a in arguments]  # before the others
        return info.op(*positional, **{k: fill(v) for k, v in keywords.items()})

    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    try:
        expected = call(*(t.clone() for t in tensors))
    except (RuntimeError, ZeroDivisionError):
        return  # eager mode refuses
    try:
        actual = pointwise(call, name=f"{variant_name(info)}_sample")(*tensors)
    except UnsupportedOpError as error:
        outcome.refused = str(error).splitlines()[0]
        return
    pairs = list(zip(_as_tuple(expected), _as_tuple(actual), strict=True))
    problems = [_judge(e.expand(shape), a) for e, a in pairs]
    if any(problems):
        # Eager mode's float32 code has errors of its own (gelu(inf) is NaN in vectors of 16).
        try:
            exact = _as_tuple(call(*(t.double() if t.is_floating_point() else t for t in tensors)))
        except (RuntimeError, ZeroDivisionError):
            exact = _as_tuple(expected)
        problems = [
            _judge(e.expand(shape), a, x.expand(shape), nan_is_free=info.name in EXCEPTIONS)
            for (e, a), x in zip(pairs, exact, strict=True)
        ]
    if any(problems):
        outcome.wrong.append(f"{next(filter(None, problems))} for {_described(arguments)} {keywords}")
    elif all(_same(e.expand(shape), a) for e, a in pairs):
        outcome.equal += 1
    else:
        outcome.close += 1


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _same(expected: Tensor, actual: Tensor) -> bool:
    return bool(((expected == actual) | ((expected != expected) & (actual != actual))).all())


def _judge(expected: Tensor, actual: Tensor, exact: Tensor | None = None, *, nan_is_free: bool = False) -> str:
    """What is wrong, if anything; an element may equal `exact`, rounded, instead of `expected`."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{actual.dtype} {list(actual.shape)}, not {expected.dtype} {list(expected.shape)}"
    wrong = ~_close(actual, expected)
    if exact is not None:
        wrong &= ~_close(actual, exact.to(expected.dtype))
    if nan_is_free and expected.is_floating_point():
        wrong &= ~expected.isnan()
    if not wrong.any():
        return ""
    where = tuple(wrong.nonzero()[0].tolist())
    return f"at {where} {actual[where].item()!r}, not {expected[where].item()!r}"


def _close(actual: Tensor, expected: Tensor) -> Tensor:
    if not expected.is_floating_point():
        return actual == expected
    relative, absolute = _TOLERANCE[expected.dtype]
    return torch.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)


def _described(arguments: Sequence[Any]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else repr(a) for a in arguments)
