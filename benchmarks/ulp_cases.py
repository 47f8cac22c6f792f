"""Cases of the ulp sweep: each rule of flexsn-codegen as a function of tensors, and arguments for these functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen import OpCall, register_op, supported_ops

Function = Callable[..., Any]
Arguments = tuple[Tensor, ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
HALVES = (torch.float16, torch.bfloat16)

_prims, _aten = torch.ops.prims, torch.ops.aten


# The approximate division of backward kernels, as a separate op. Backward kernels use it where it only affects
# gradients.
_LIBRARY = torch.library.Library("flexsn_sweep", "DEF")
_LIBRARY.define("fast_div(Tensor x, Tensor y) -> Tensor")
_LIBRARY.impl("fast_div", torch.div, "CompositeExplicitAutograd")
torch.library.register_fake("flexsn_sweep::fast_div", lambda x, y: torch.empty_like(x), lib=_LIBRARY)


@register_op(torch.ops.flexsn_sweep.fast_div.default)
def _fast_div(call: OpCall) -> str:
    return f"dev.fast_div({', '.join(call.operands)})"


@dataclass(frozen=True, slots=True)
class Case:
    """A function whose kernel is compared with eager mode.

    Attributes:
        name: unique name.
        op: op whose rule the case tests.
        function: function of `arity` tensors with one or several results.
        limit: allowed error in ulp.
        keep: function that returns True for the arguments that count. For all other arguments, the result of eager
            mode is arbitrary.
        why_keep: description of the arguments that count.
    """

    name: str
    op: str
    function: Function
    arity: int
    dtypes: tuple[torch.dtype, ...]
    limit: int
    keep: Callable[..., Tensor] | None = None
    why_keep: str = ""


# Functions that are approximate, both in eager mode and here. All other ops are exact.
_APPROXIMATE = {
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh", "atan2", "hypot"),
    *("fast_div", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "rsqrt"),
    *("erf", "erf_inv", "erfc", "erfcx", "ndtri", "lgamma", "digamma", "zeta", "polygamma", "spherical_bessel_j0"),
    *("igamma", "igammac"),
    *("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "bessel_j0", "bessel_j1"),
    *("special_bessel_y0", "special_bessel_y1", "special_modified_bessel_i0", "special_modified_bessel_i1"),
    *("special_modified_bessel_k0", "special_modified_bessel_k1"),
    *("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
}
# Ops that only take floating-point numbers. Tracing converts integers before it calls such an op.
_FLOAT_ONLY = _APPROXIMATE - {"pow"} | {"sqrt", "reciprocal", "nextafter", "frexp"}
_INTEGER_ONLY = {"gcd", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left"}
_INTEGER_ONLY |= {"shift_right_arithmetic"}
# Smallest argument of polygamma and zeta that counts, because their series takes about |x| steps for a negative x.
_MOST_NEGATIVE = -64.0


def cases() -> tuple[list[Case], dict[str, str]]:
    """Returns all cases, and a reason for each op without a case."""
    all_cases: list[Case] = []
    uncovered: dict[str, str] = {}
    for op in supported_ops():
        cases_of_op = list(_cases_of(op))
        if "polynomial" in op._opname:
            uncovered[str(op)] = "eager mode's recurrence in float32 has no correct digit close to a root"
        elif not cases_of_op:
            uncovered[str(op)] = (
                f"the arguments of the op are not one or two tensors, and it has no case of its own: {op._schema}"
            )
        all_cases += cases_of_op
    assert len({case.name for case in all_cases}) == len(all_cases)
    return all_cases, uncovered


def _cases_of(op: Any) -> Iterator[Case]:
    name: str = op._opname
    limit = 2 if name in _APPROXIMATE else 0
    arguments = op._schema.arguments
    dtypes = FLOATS if name in _FLOAT_ONLY else INTEGERS if name in _INTEGER_ONLY else FLOATS + INTEGERS

    def case(
        name_of_case: str, function: Function, arity: int, dtypes: tuple[torch.dtype, ...] = dtypes, **fields: Any
    ) -> Case:
        return Case(name_of_case, str(op), function, arity, dtypes, **{"limit": limit, **fields})

    if "polynomial" in name:
        return
    if name == "where":
        yield case(name, lambda x, y: op(x > y, x, y), 2)
    elif name == "convert_element_type":
        yield case("convert to floats and bool", functools.partial(_convert_to_all, op), 1)
        for target in INTEGERS[:-1]:
            label = f"convert to {_format_dtype(target)}"
            keep = functools.partial(_fits, target)
            yield case(
                label, functools.partial(op, dtype=target), 1, keep=keep, why_keep="numbers in the range of the result"
            )
    elif name == "signbit":
        # `torch.signbit` is called, because the prim declares that its result has the dtype of its argument.
        yield case(name, torch.signbit, 1)
    elif name == "polygamma":
        for order in range(5):
            # The orders two and larger are computed with zeta.
            fields_of_order: dict[str, Any] = (
                {"keep": _is_above, "why_keep": f"x > {_MOST_NEGATIVE:.0f}"} if order >= 2 else {}
            )
            yield case(f"polygamma {order}", functools.partial(op, order), 1, **fields_of_order)
    elif name == "zeta":
        yield case(name, op, 2, keep=lambda s, q: _is_above(q), why_keep=f"q > {_MOST_NEGATIVE:.0f}")
    elif name in {"div", "fmod", "remainder"}:
        yield case(name, op, 2, FLOATS)
        reason = "without division by 0, and without division of the smallest number by -1"
        yield case(f"{name} of integers", op, 2, INTEGERS[:-1], keep=_is_divisible, why_keep=reason)
        if name == "div":
            for divisor in (3.0, 0.7, 1.7, 2.3, 4.3, -1e30, 1e-40):
                yield case(f"div by the number {divisor}", lambda x, d=divisor: x / d, 1, FLOATS)
    elif name == "pow":
        yield case(name, op, 2, FLOATS)
        yield case("pow of integers", op, 2, INTEGERS[:-1], limit=0)
        for exponent in (2.0, 3.0, -1.0, -2.0, 0.5, 0.0, 1.0):
            yield case(f"pow by the number {exponent}", functools.partial(_raise_to, exponent), 1, FLOATS, limit=0)
        for exponent in (-0.5, 1.7, -3.0):
            yield case(f"pow by the number {exponent}", functools.partial(_raise_to, exponent), 1, FLOATS)
    elif name == "conj_physical":
        # `torch.conj_physical` is called, because the prim rejects real numbers in eager mode.
        yield case(name, torch.conj_physical, 1)
    elif name == "gcd":
        yield case(name, op, 2, INTEGERS[:-1], keep=_have_magnitudes, why_keep="without the smallest number")
    elif [str(a.type) for a in arguments] in (["Tensor"], ["Tensor", "Tensor"]):
        yield case(name, op, len(arguments))


def _raise_to(exponent: float, x: Tensor) -> Tensor:
    return torch.pow(x, exponent)


def _convert_to_all(op: Any, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(op(x, target) for target in (*FLOATS, torch.bool))


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_above(x: Tensor) -> Tensor:
    return ~(x <= _MOST_NEGATIVE)


def _is_divisible(x: Tensor, y: Tensor) -> Tensor:
    least = torch.iinfo(x.dtype).min
    return (y != 0) & ~((x == least) & (y == -1)) if least else y != 0


def _have_magnitudes(x: Tensor, y: Tensor) -> Tensor:
    least = torch.iinfo(x.dtype).min
    return (x != least) & (y != least) if least else torch.ones_like(x, dtype=torch.bool)


def _fits(target: torch.dtype, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.ones_like(x, dtype=torch.bool)
    # Unsigned integers are converted through int64, and wrap around.
    info = torch.iinfo(target if target.is_signed else torch.int64)
    return (x.double() > info.min - 1.0) & (x.double() < info.max + 1.0)


# -- arguments -----------------------------------------------------------------------------------------------


# Numbers near which a function changes its sign, becomes infinite or is computed by another formula, and numbers near
# which results were wrong before.
_CENTRES = (
    *(0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 13.0, 16.0, 34.0, 50.0, 64.0, 100.0),
    *(math.pi / 4, math.pi / 2, math.pi, 3 * math.pi / 2, 2 * math.pi, 105615.0),
    *(math.log(2), math.e, 88.72284, 87.33655, 103.97208, 709.782712893384, 708.3964, 745.1332, 127.0, 128.0, 149.0),
    *(1022.0, 1024.0, 1074.0, 11.0899, 16.6355, 9.010913, 0.625, 0.46875, 3.9192059, 10.05, 14.5, 26.5, 27.2),
    *(1.4616321449683623, 0.5040830082644554, 2.4570247382208006, 2.404825557695773, 3.8317059702075125),
    *(0.893576966279167, 2.197141326031017, 5.520078110286311, 2.0**-126, 2.0**-1022, 2.0**-24, 2.0**-14),
    *(2.0**22, 2.0**23, 2.0**24, 2.0**31, 2.0**52, 2.0**53, 2.0**63, 65504.0, 65520.0, 1e-4, 1e-8, 1e4, 1e30),
)
_SPECIAL = (0.0, math.inf, math.nan, 2.0**-149, 5e-324, 1e-40, 1e-310, 1e-20, 1e-37, 1e300, 1e38, 0.1, 1 / 3, 7.0)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Size:
    """Counts of the arguments with which a case is tested.

    Attributes:
        stride: stride of the float32 bit patterns. It is odd, so that all low bits occur.
        window: number of neighbouring numbers on each side of each number in `_CENTRES`.
        random: number of random arguments from each distribution.
        specials: number of special values, all pairs of which are tested.
    """

    stride: int
    window: int
    random: int
    specials: int


FULL = Size(stride=257, window=2**15, random=2**21, specials=1000)
SOME = Size(stride=2**14 + 1, window=64, random=2**15, specials=256)
QUICK = Size(stride=2**21 + 1, window=2, random=2**10, specials=24)
CHUNK = 2**24


def chunks(case: Case, dtype: torch.dtype, size: Size, device: torch.device) -> Iterator[Arguments]:
    """Yields the arguments of a case, about `CHUNK` elements at a time."""
    generator = torch.Generator(device).manual_seed(0)
    for part in _make_pairs(dtype, size, generator) if case.arity == 2 else zip(_make_values(dtype, size, generator)):
        for begin in range(0, part[0].numel(), CHUNK):
            arguments = tuple(t[begin : begin + CHUNK] for t in part)
            if case.keep is not None:
                mask = case.keep(*arguments)
                arguments = tuple(t[mask] for t in arguments)
            if arguments[0].numel():
                yield arguments


def _make_values(dtype: torch.dtype, size: Size, generator: torch.Generator) -> Iterator[Tensor]:
    device = generator.device
    if dtype == torch.bool:
        yield torch.tensor([False, True], device=device)
    elif dtype.itemsize <= 2:
        yield _list_patterns(dtype, device, 1)
    elif dtype == torch.float32:
        # The patterns are made in pieces, because all patterns together would take 34 GB in int64.
        pieces = max(1, 2**32 // size.stride // CHUNK)
        for piece in range(pieces):
            yield _list_patterns(dtype, device, size.stride, piece, pieces)
    if dtype.itemsize > 2:
        yield _list_interesting(dtype, size.window, device)
        yield from _draw_values(dtype, size.random, generator)


def _make_pairs(dtype: torch.dtype, size: Size, generator: torch.Generator) -> Iterator[Arguments]:
    device = generator.device
    if dtype.itemsize == 1:
        values = next(_make_values(dtype, size, generator))
        yield _pair_all(values, values)
        return
    special = _thin_out(_list_interesting(dtype, 1, device), size.specials)
    yield _pair_all(special, special)
    if dtype in HALVES:
        # Pairs of a number with one of about 64 special numbers, in both orders.
        patterns = _thin_out(_list_patterns(dtype, device, 1), size.random)
        yield _pair_all(patterns, _thin_out(special, 64))
        yield _pair_all(_thin_out(special, 64), patterns)
    for x in _draw_values(dtype, size.random, generator):
        y = x[torch.randperm(x.numel(), generator=generator, device=device)]
        yield x, y
        if dtype.is_floating_point:
            # Pairs of adjacent numbers, which decide comparisons, remainders and differences.
            yield x, (x.view(_BITS[x.itemsize]) ^ 1).view(dtype)
        yield x, _thin_out(special, 512)[torch.arange(x.numel(), device=device) % min(512, special.numel())]


def _list_patterns(
    dtype: torch.dtype, device: torch.device, stride: int, piece: int = 0, num_pieces: int = 1
) -> Tensor:
    bits = _BITS[dtype.itemsize]
    info = torch.iinfo(bits)
    count = -(-(info.max - info.min + 1) // stride)
    begin, end = count * piece // num_pieces, count * (piece + 1) // num_pieces
    patterns = torch.arange(begin, end, device=device, dtype=torch.int64) * stride + info.min
    return patterns.to(bits).view(dtype)


def _list_interesting(dtype: torch.dtype, window: int, device: torch.device) -> Tensor:
    """Returns the special values and the neighbours of the numbers in `_CENTRES`, with both signs."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        near_zero = torch.arange(max(info.min, -64), 65, device=device)
        powers = torch.tensor([2**k for k in range(info.bits - 1)], device=device)
        edges = torch.tensor([info.max, info.max - 1, info.min, info.min + 1], device=device)
        return torch.cat([near_zero, powers - 1, powers, edges] + ([-powers] if info.min else [])).to(dtype)
    bits = _BITS[dtype.itemsize]
    centres = torch.tensor(_CENTRES, dtype=torch.float64, device=device).to(dtype)
    around = torch.arange(-window, window + 1, device=device)
    near = (centres.view(bits).to(torch.int64)[:, None] + around).flatten()
    near = near[(near >= 0) & (near <= torch.iinfo(bits).max)]
    limits = torch.finfo(dtype)
    edges = torch.tensor([*_SPECIAL, limits.max, limits.tiny, limits.eps], dtype=torch.float64, device=device)
    denormal = torch.arange(window + 1, device=device)
    positive = torch.cat([edges.to(dtype), near.to(bits).view(dtype), denormal.to(bits).view(dtype)])
    return torch.cat([positive, -positive])


def _draw_values(dtype: torch.dtype, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    device = generator.device
    bits = _BITS[dtype.itemsize]
    info = torch.iinfo(bits)
    patterns = torch.randint(info.min, info.max, (count,), dtype=torch.int64, generator=generator, device=device)
    yield patterns.to(bits).view(dtype)
    if dtype.is_floating_point:
        uniform = torch.rand(3, count, dtype=torch.float64, generator=generator, device=device) * 2 - 1
        yield (uniform[0] * 20).to(dtype)
        yield (uniform[1].sign() * torch.exp2(uniform[2] * 24)).to(dtype)
    else:
        yield patterns.remainder(17).to(dtype)


def _pair_all(x: Tensor, y: Tensor) -> Arguments:
    return x.repeat_interleave(y.numel()), y.repeat(x.numel())


def _thin_out(values: Tensor, count: int) -> Tensor:
    """Returns at most about `count` of the values, evenly spaced."""
    return values[:: max(1, -(-values.numel() // count))]
