"""Each rule for an op in C++ is compiled, and has the same bits as eager mode on the CPU.

`test_codegen_cpp_functions.py` tests approximations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpp_library import COMPILER, Function, Library
from torch import Tensor

from flexsn_codegen.targets.cpp._rules import RULES
from flexsn_codegen.targets.triton._rules import RULES as TRITON_RULES

_prims = torch.ops.prims

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, torch.bool)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

_Cases = dict[str, tuple[Function, int, tuple[torch.dtype, ...]]]


def _prim(name: str) -> Function:
    function: Function = getattr(_prims, name).default
    return function


def _prims_of(names: str, arity: int, dtypes: tuple[torch.dtype, ...]) -> _Cases:
    return {name: (_prim(name), arity, dtypes) for name in names.split()}


def _halves_of_eager(x: Tensor) -> Tensor:
    return torch.where(x > 0.7, 0.3, x) + x


def _with_tensors_without_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    number = torch.full((), 0.3)
    return number * x, x * number, number / x, x / number, number + x, x - number, number - x


def _shorten(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Maps a name to a function, the count of its arguments, and the possible dtypes, one of which all arguments have.
CASES: _Cases = {
    **_prims_of("sign", 1, ALL),
    **_prims_of("abs neg ceil floor round trunc isfinite", 1, NUMBERS),
    **_prims_of("sqrt reciprocal rsqrt", 1, FLOATS),
    **_prims_of("add mul eq ne lt le gt ge maximum minimum fmax fmin", 2, ALL),
    **_prims_of("sub", 2, NUMBERS),
    **_prims_of("nextafter", 2, FLOATS),
    **_prims_of("bitwise_and bitwise_or bitwise_xor", 2, (*INTEGERS, torch.bool)),
    **_prims_of("shift_left shift_right_arithmetic", 2, INTEGERS),
    "bitwise_not": (torch.bitwise_not, 1, (*INTEGERS, torch.bool)),
    "signbit": (torch.signbit, 1, ALL),
    "conj_physical": (torch.conj_physical, 1, ALL),
    "frexp": (torch.frexp, 1, FLOATS),
    "angle": (torch.angle, 1, (torch.float64, torch.float32, *INTEGERS, torch.bool)),
    "where": (lambda x, y: torch.where(x > y, x, y), 2, ALL),
    "where_bool": (lambda x, y: torch.where(x, y, x), 2, (torch.bool,)),
    "div": (_prim("div"), 2, FLOATS),
    "remainder": (torch.remainder, 2, FLOATS),
    "fmod": (torch.fmod, 2, FLOATS),
    "pow": (torch.pow, 2, INTEGERS),
    "int_div": (_prim("div"), 2, INTEGERS),
    "int_fmod": (torch.fmod, 2, INTEGERS),
    "int_remainder": (torch.remainder, 2, INTEGERS),
    "floor_divide": (torch.floor_divide, 2, INTEGERS),
    "gcd": (torch.gcd, 2, INTEGERS),
    "half_steps": (_halves_of_eager, 1, FLOATS),
    "by_numbers": (lambda x: (x * 0.1, x > 0.3, x == 0.1), 1, FLOATS),
    "plus_numbers": (lambda x: (x + 0.3, 0.7 - x, x - 0.1, 3 * x + 2), 1, FLOATS),
    # In float32 and float64, eager mode uses one vector instruction, which does not round the product.
    "plus_multiple": (lambda x: (torch.add(x, 0.7, alpha=0.3), torch.sub(x, 0.7, alpha=0.3)), 1, FLOATS[2:]),
    "scalar_tensors": (_with_tensors_without_dimensions, 1, FLOATS),
    **{f"div_{d}": (functools.partial(lambda d, x: x / d, d), 1, FLOATS) for d in (3.0, 0.7, -1e30, 1e-40)},
    **{f"over_{n}": (functools.partial(lambda n, x: n / x, n), 1, FLOATS) for n in (1.0, 0.3)},
    **{f"pow_{p}": (functools.partial(lambda p, x: x**p, p), 1, FLOATS) for p in (2, 3, -1, -2, 0, 1)},
    # In float16, eager mode computes these differently, which is visible at -inf and -0.
    **{f"pow_{p}": (functools.partial(lambda p, x: x**p, p), 1, FLOATS[:2]) for p in (0.5, -0.5)},
    "to_floats": (lambda x: tuple(x.to(d) for d in FLOATS if d != x.dtype), 1, (*ALL, *WIDE_UNSIGNED)),
    "to_integers": (lambda x: tuple(x.to(d) for d in INTEGERS if d != x.dtype), 1, (*ALL, *WIDE_UNSIGNED)),
    "to_unsigned": (
        lambda x: tuple(x.to(d) for d in (torch.uint16, torch.uint64) if d != x.dtype),
        1,
        (*ALL, *WIDE_UNSIGNED),
    ),
    "to_uint32": (lambda x: x.to(torch.uint32), 1, (*ALL, torch.uint16, torch.uint64)),
    "to_bool": (lambda x: x.to(torch.bool), 1, (*NUMBERS, *WIDE_UNSIGNED)),
}


def _make_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _compute_in_vectors(function: Function) -> Function:
    """Returns a function that pads its inputs, so that eager mode computes all elements in whole vectors."""
    return lambda x: tuple(t[: x.numel()] for t in _make_tuple(function(torch.cat([x, x.new_zeros(64)]))))


def _exact_sqrt(x: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        root = torch.from_numpy(np.sqrt(x.double().numpy()))
    return root.to(torch.promote_types(x.dtype, torch.float32))


# References for functions whose bits vary in eager mode on the CPU. There, a square root is off by 1 ulp for one sixth
# of the numbers. In half dtypes, `rsqrt` and a sum with a multiple round once in vectors, and twice in the remainder.
EXPECTED: dict[str, Function] = {
    "sqrt": lambda x: _exact_sqrt(x).to(x.dtype),
    "pow_0.5": _exact_sqrt,
    "pow_-0.5": lambda x: 1.0 / _exact_sqrt(x),
    "rsqrt": lambda x: (1.0 / _exact_sqrt(x)).to(x.dtype),
    "plus_multiple": _compute_in_vectors(CASES["plus_multiple"][0]),
}


# Functions that trap for some arguments, in each dtype.
_TRAPS = {"int_div", "int_fmod", "int_remainder", "floor_divide", "gcd"}
_PARAMETERS = [(name, dtype) for name, (_, _, dtypes) in CASES.items() for dtype in dtypes]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Returns a library of the cases that the tests of this run use, and of the functions that trap."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    tested = {(params.get("name"), params.get("dtype")) for params in calls}
    collection = Library()
    kinds = dict.fromkeys((dtype, arity) for _, arity, dtypes in CASES.values() for dtype in dtypes)
    for dtype, arity in kinds:
        names = [name for name, (_, count, dtypes) in CASES.items() if count == arity and dtype in dtypes]
        selected = [name for name in names if name in _TRAPS or (name, dtype) in tested]
        collection.add_together({f"{name} {dtype}": CASES[name][0] for name in selected}, *[dtype] * arity)
    for dtype in WIDE_UNSIGNED:
        collection.add(f"unsigned {dtype}", wide_unsigned, dtype, dtype)
    collection.compile(Path(tmp_path_factory.mktemp("rules")))
    return collection


def wide_unsigned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        *(_prims.add(x, y), _prims.sub(x, y), _prims.lt(x, y), _prims.div(x, y), _prims.bitwise_not(x)),
        *(_prims.maximum(x, y), _prims.fmod(x, y), _prims.abs(x), _prims.sign(x), _prims.neg(x)),
    )


# -- arguments -----------------------------------------------------------------------------------------------

SPECIAL = [
    *(0.0, 1.0, 0.5, 1.5, 2.5, 3.5, 0.3, 0.1, 0.7, 1e-40, 1e-45, 1e-310, 1e30, 3.0, 7.0, 100.7, 300.7, 65519.0),
    *(65520.0, 2.0**31, 2.0**32 + 4096, 2.0**63, 1.2e19, 2e19, 1e300, float("inf"), float("nan")),
]


def list_arguments(dtype: torch.dtype, arity: int) -> tuple[Tensor, ...]:
    """Returns all pairs of special values, and random pairs."""
    if dtype == torch.bool:
        values = torch.tensor([False, True])
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        edges = torch.tensor([info.max, info.tiny, info.eps, info.smallest_normal / 4], dtype=dtype)
        positive = torch.cat([torch.tensor(SPECIAL, dtype=torch.float64).to(dtype), edges])
        values = torch.cat([positive, -positive])
    else:
        bounds = torch.iinfo(dtype)
        numbers = [0, 1, 2, 3, 7, 8, 31, 63, 64, 100, bounds.max, bounds.min, bounds.max - 1]
        numbers += [-1, -2, -7, -64] if bounds.min < 0 else []
        values = torch.tensor(numbers, dtype=dtype)
    if arity == 1:
        return (torch.cat([values.repeat(9), _draw(dtype, 0)]),)
    pairs = torch.cartesian_prod(values, values).unbind(1)
    return tuple(torch.cat([pair, _draw(dtype, seed)]) for seed, pair in enumerate(pairs))


def _draw(dtype: torch.dtype, seed: int, count: int = 4099) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(bits).view(dtype)
    if not dtype.is_floating_point:
        return patterns
    patterns[patterns.isnan()] = torch.nan  # no signalling NaN, because some functions treat it differently
    return torch.cat([patterns, (torch.randn(count, generator=generator, dtype=torch.float64) * 3).to(dtype)])


def find_traps(name: str, x: Tensor, y: Tensor) -> Tensor:
    """Returns a mask of the elements for which eager mode traps, or has results that depend on the processor."""
    least = torch.iinfo(x.dtype).min
    edge = (x == least) | (y == least) if name == "gcd" else (x == least) & (y == -1)
    by_zero = torch.zeros_like(edge) if name == "gcd" else y == 0
    return by_zero | (edge if least < 0 else torch.zeros_like(edge))


def assert_same(actual: Tensor, expected: Tensor, *, zeros: bool = True) -> None:
    assert actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)
    if zeros:
        zero = expected == 0
        assert torch.equal(torch.signbit(actual[zero]), torch.signbit(expected[zero]))


# Functions whose vectorised code in eager mode uses SLEEF's fmodf, which returns NaN or rounds for large quotients.
_WRONG_IN_EAGER = {"fmod", "remainder"}


@pytest.mark.long(
    all_but=[
        "div_-1e+30-float32",
        "div_1e-40-float16",
        "pow_-1-float64",
        "bitwise_and-uint8",
        "bitwise_xor-bool",
        "shift_left-int64",
        "bitwise_not-int8",
        "signbit-float64",
        "where-int32",
        "int_fmod-int16",
        "div_0.7-float32",
        "over_1.0-float16",
        "over_0.3-bfloat16",
        "to_floats-uint16",
        "pow_-2-bfloat16",
        "to_uint32-uint64",
        "to_integers-uint32",
        "shift_right_arithmetic-uint8",
        "conj_physical-int8",
        "angle-uint8",
        "where_bool-bool",
        "int_remainder-int32",
        "floor_divide-int16",
        "gcd-int16",
        "pow_2-float64",
        "pow_3-float32",
        "pow_0-bfloat16",
        "pow_1-float32",
        "to_bool-int64",
        "sign-uint8",
        "abs-int16",
        "ceil-int32",
        "floor-int64",
        "round-int32",
        "trunc-uint8",
        "isfinite-float32",
        "add-int32",
        "ge-int64",
        "minimum-bool",
        "fmax-int32",
        "fmin-int64",
        "sub-uint8",
        "bitwise_or-int64",
        "pow-int16",
        "int_div-int16",
        "half_steps-float64",
        "plus_numbers-bfloat16",
        "plus_multiple-bfloat16",
        "div_3.0-float64",
        "to_unsigned-int32",
        "neg-int16",
        "mul-bool",
        "eq-int64",
        "lt-uint8",
        "le-int64",
        "gt-int32",
        "nextafter-float64",
        "scalar_tensors-float32",
        "reciprocal-float16",
        "rsqrt-bfloat16",
        "ne-uint8",
        "maximum-float64",
        "frexp-float64",
        "div-float16",
        "fmod-float16",
        "by_numbers-float16",
        "pow_0.5-float64",
        "pow_-0.5-float64",
        "remainder-float16",
        "sqrt-float32",
    ]
)
@pytest.mark.parametrize(("name", "dtype"), _PARAMETERS, ids=[f"{n}-{_shorten(d)}" for n, d in _PARAMETERS])
def test_rules_have_the_bits_of_eager_mode(library: Library, name: str, dtype: torch.dtype) -> None:
    function, arity, _ = CASES[name]
    inputs = list_arguments(dtype, arity)
    if name in _TRAPS:
        is_safe = ~find_traps(name, *inputs)
        inputs = tuple(t[is_safe] for t in inputs)
    if name == "to_uint32" and dtype.is_floating_point:
        # For numbers out of range, the result of eager mode depends on the number's position in a vector.
        (x,) = inputs
        inputs = (x[(x > -(2.0**31)) & (x < 2.0**32)],)
    function = EXPECTED.get(name, function)
    # For single elements, eager mode calls the C++ library's fmod, which is exact.
    expected = _compute_one_by_one(function, inputs) if name in _WRONG_IN_EAGER else function(*inputs)
    # The maximum of 0 and -0 may be either. In eager mode, too, the result depends on the position in a vector.
    zeros = name not in {"maximum", "minimum", "fmax", "fmin"}
    for actual, reference in zip(library.call(f"{name} {dtype}", *inputs), _make_tuple(expected), strict=True):
        assert_same(actual, reference, zeros=zeros)


def _compute_one_by_one(function: Any, tensors: Iterable[Tensor]) -> Tensor:
    """Computes elements one by one and not in vectors, because the inputs are strided."""
    spread = [torch.stack([t, t], dim=1)[:, 0] for t in tensors]
    result: Tensor = function(*spread)
    return result


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_division_never_traps(library: Library, dtype: torch.dtype) -> None:
    x = list_arguments(dtype, 1)[0]
    zero, minus_one = torch.zeros_like(x), torch.full_like(x, -1 if dtype.is_signed else 1)
    for name, by_zero, by_minus_one in (
        ("int_div", x, x * minus_one),
        ("int_fmod", zero, zero),
        ("int_remainder", zero, zero),
        ("gcd", x.abs(), torch.ones_like(x)),
    ):
        assert torch.equal(library.call(f"{name} {dtype}", x, zero)[0], by_zero), name
        assert torch.equal(library.call(f"{name} {dtype}", x, minus_one)[0], by_minus_one), name


@pytest.mark.parametrize("dtype", WIDE_UNSIGNED)
def test_wide_unsigned_integers_wrap(library: Library, dtype: torch.dtype) -> None:
    # Eager mode supports few ops on these dtypes.
    top = torch.iinfo(dtype).max
    numbers = [0, 1, 5, top, top - 1, 2**15, top // 2 + 1]
    pairs = [(a, b) for a in numbers for b in numbers]
    x, y = (torch.tensor([pair[i] for pair in pairs], dtype=dtype) for i in range(2))
    expected = [
        *([(a + b) % (top + 1) for a, b in pairs], [(a - b) % (top + 1) for a, b in pairs], [a < b for a, b in pairs]),
        *([a // b if b else a for a, b in pairs], [top - a for a, _ in pairs], [max(pair) for pair in pairs]),
        *([a % b if b else 0 for a, b in pairs], [a for a, _ in pairs], [min(a, 1) for a, _ in pairs]),
        [-a % (top + 1) for a, _ in pairs],
    ]
    for actual, reference in zip(library.call(f"unsigned {dtype}", x, y), expected, strict=True):
        assert actual.tolist() == reference


def test_there_is_a_rule_for_each_op_that_triton_has() -> None:
    assert set(RULES) == set(TRITON_RULES)
