"""Approximate functions in C++ are within a few units in the last place of the true values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from cpp_library import COMPILER, MORE_FLAGS, Function, Library
from torch import Tensor
from ulp_distance import ulp_distance, zero_signs_differ

_special = torch.special

FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "cos", "cosh", "sin", "sinh", "tan", "tanh", "rsqrt"),
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "erf", "erfc", "erfinv", "lgamma"),
)
# Most neurons use these functions, whose float32 code is vectorised.
OFTEN = ("exp", "expm1", "tanh", "log", "log1p", "sin", "cos", "atan", "erf")
_TRUE: dict[str, Callable[[Any], Any]] = {
    "exp2": lambda x: mpmath.power(2, x),
    "log2": lambda x: mpmath.log(x, 2),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))),
}
# Torch's implementations of special functions. y1 calls a function whose rounding depends on the code around the call.
SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    **{
        name: (getattr(_special, name), 0)
        for name in (
            *("i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0", "digamma", "ndtri"),
            *("modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1"),
            *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0"),
        )
    },
    "erfcx": (_special.erfcx, 1),
    "bessel_y1": (_special.bessel_y1, 200),
    "zeta": (lambda x: _special.zeta(x.abs() + 1.5, x.abs()), 0),
    "igamma": (lambda x: torch.igamma(x.abs(), x.abs() + 0.5), 64),
    "igammac": (lambda x: torch.igammac(x.abs(), x.abs() + 0.5), 64),
    **{f"polygamma_{n}": (functools.partial(torch.polygamma, n), 0) for n in range(4)},
    **{
        f"{name}_{degree}": (functools.partial(lambda f, n, x: f(x, n), getattr(_special, name), degree), 0)
        for name in (
            *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
            *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
        )
        for degree in (0, 7)
    },
}
OF_INTEGERS = ("bessel_j0", "chebyshev_polynomial_t_7")
FLOATS = (torch.float64, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Returns a library of the functions that the tests of this run use."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    collection = Library()
    test_names = " ".join(item.name for item in request.session.items)

    def add(functions: Mapping[str, Function], dtype: torch.dtype, arity: int = 1) -> None:
        collection.add_together({f"{name} {dtype}": f for name, f in functions.items()}, *[dtype] * arity)

    special = {name: function for name, (function, _) in SPECIAL.items()}
    tested = [name for name in FUNCTIONS if f"test_float32_functions_are_near_the_true_values[{name}]" in test_names]
    add({name: getattr(torch, name) for name in FUNCTIONS}, torch.float64)
    add({name: getattr(torch, name) for name in tested}, torch.float32)
    for i, dtype in enumerate(FLOATS):
        add({name: getattr(torch, name) for name in ("pow", "atan2", "hypot")}, dtype, 2)
        bits = [name for name in special if f"have_the_bits_of_eager_mode[{name}-dtype{i}]" in test_names]
        compared = OF_INTEGERS if dtype == torch.float32 else ()
        add({name: special[name] for name in dict.fromkeys([*bits, *compared])}, dtype)
    for dtype in HALVES:
        add({name: getattr(torch, name) for name in OFTEN}, dtype)
    for dtype in (torch.float32, *HALVES):
        add({"sigmoid": torch.sigmoid}, dtype)
    add({name: special[name] for name in OF_INTEGERS}, torch.int32)
    collection.compile(Path(tmp_path_factory.mktemp("functions")))
    return collection


def list_numbers(dtype: torch.dtype, stride: int) -> Tensor:
    """Returns numbers of all magnitudes, including infinities and NaN."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(bits)
    values = torch.arange(info.min, info.max + 1, stride, dtype=torch.int64).to(bits).view(dtype)
    edges = torch.tensor([0.0, 1.0, 2.0, 0.5, 1e-40, math.inf, math.nan], dtype=dtype)
    return torch.cat([values, edges, -edges])


def assert_near(actual: Tensor, expected: Tensor, ulp: int) -> None:
    distance = ulp_distance(actual, expected)
    worst = int(distance.argmax())
    assert distance[worst] <= ulp, (worst, actual[worst].item(), expected[worst].item())
    assert not zero_signs_differ(actual, expected).any()


@pytest.mark.long(all_but=["exp", "sin"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_functions_are_near_the_true_values(library: Library, name: str) -> None:
    function = getattr(torch, name)
    # Random numbers, for which most functions are neither 0, nor 1, nor infinite.
    near = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 4
    # The numbers nearest to multiples of pi / 2. There, a sine or cosine near 0 is inaccurate unless its argument is
    # reduced with additional digits of pi.
    quarters = (torch.arange(90000, dtype=torch.float64) * (math.pi / 2)).float()
    x = torch.cat([list_numbers(torch.float32, 65537), near, near / 4, near * 16, quarters])
    assert_near(library(f"{name} torch.float32", x), function(x.double()).float(), 1 if name != "expm1" else 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_functions_are_near_the_true_values(library: Library, name: str) -> None:
    x = _draw_float64_arguments(name)
    actual = library(f"{name} torch.float64", x)
    expected = getattr(torch, name)(x)
    assert torch.equal(actual.isfinite(), expected.isfinite())
    assert not zero_signs_differ(actual, expected).any()
    true = _TRUE.get(name) or getattr(mpmath, name)
    with mpmath.workprec(200):
        for number, ours in zip(x.tolist(), actual.tolist(), strict=True):
            if math.isfinite(ours) and math.isfinite(number) and number != 0.0:
                assert _measure_error(ours, true(mpmath.mpf(number))) <= 2.0, (number, ours)


def _draw_float64_arguments(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (60,), generator=generator).view(torch.float64)
    uniform = torch.rand(2, 60, generator=generator, dtype=torch.float64)
    # These numbers are near 1, where some functions have a pole, and where glibc's erfc and lgamma are off by 3 ulp.
    numbers = [0.0, 1.0, 1.0 - 2.0**-53, 1.0 - 2.0**-30, 1.2351594492925155, 1.5434767776844698, math.inf, math.nan]
    edges = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.float64)
    x = torch.cat([bits, uniform[0] * 2 - 1, torch.exp2(uniform[1] * 14 - 7), -torch.exp2(uniform[1] * 14 - 7), edges])
    # The numbers are limited, because mpmath is slow for larger numbers.
    return x[(x.abs() < 1e3) | ~x.isfinite()] if name in {"erfc", "lgamma", "exp", "expm1", "sinh", "cosh"} else x


def _measure_error(ours: float, true: Any) -> float:
    """Returns the error in ulp, relative to the true value."""
    exponent = max(math.frexp(float(true))[1] - 53, -1074)
    return float(abs(mpmath.mpf(ours) - true) * mpmath.mpf(2) ** -exponent)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OFTEN)
def test_functions_of_all_half_values_are_near_the_true_values(library: Library, name: str, dtype: torch.dtype) -> None:
    x = list_numbers(dtype, 1)
    function = getattr(torch, name)
    assert_near(library(f"{name} {dtype}", x), function(x.double()).to(dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_sigmoid_is_near_the_value_of_eager_mode(library: Library, dtype: torch.dtype) -> None:
    x = list_numbers(torch.float32, 65537) if dtype == torch.float32 else list_numbers(dtype, 1)
    x = torch.cat([x, x[x.abs() < 1e3] % 20])
    # The reference is float32, as in eager mode. It is 0 if exp(-x) is infinite and the true value is denormal.
    assert_near(library(f"sigmoid {dtype}", x), torch.sigmoid(x.float()).to(dtype), 2 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["pow", "atan2", "hypot"])
def test_functions_of_two_arguments_are_near_the_true_values(library: Library, name: str, dtype: torch.dtype) -> None:
    numbers = [0.0, 1.0, 2.0, 3.0, 0.5, 1.5, math.inf, 1e-45, 3e38, 2.0**23 + 1, 2.0**24, 2.0**24 + 2, 127.0, 149.0]
    values = torch.tensor([*numbers, *(-n for n in numbers), math.nan], dtype=dtype)
    pairs = torch.cartesian_prod(values, values).unbind(1)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.cat([p, torch.randn(20000, generator=generator, dtype=dtype) * 9]) for p in pairs)
    x = torch.cat([x, 1.0 + x[-20000:] * 1e-3])
    y = torch.cat([y, y[-20000:] * 300])
    # The reference is a float64 result of another library, which may also be off by 1 ulp.
    expected = getattr(torch, name)(x.double(), y.double()).to(dtype)
    assert_near(library(f"{name} {dtype}", x, y), expected, 1 if dtype == torch.float32 else 2)


@pytest.mark.long(all_but=["*-dtype1", "*_7-dtype0", "zeta-*", "igamma*", "digamma-*", "bessel_y1-*", "polygamma_2-*"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_have_the_bits_of_eager_mode(library: Library, name: str, dtype: torch.dtype) -> None:
    function, ulp = SPECIAL[name]
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2000, generator=generator, dtype=torch.float64)
    normal = torch.randn(2000, generator=generator, dtype=torch.float64)
    edges = torch.tensor([0.0, 1.0, 2.0, 1e-30, 1e30, math.inf, math.nan], dtype=torch.float64)
    x = torch.cat([normal * 4, uniform, uniform * 40, edges, -edges]).to(dtype)
    actual, expected = library(f"{name} {dtype}", x), function(x)
    if MORE_FLAGS or "g++" not in str(COMPILER):
        # The compiler decides which products and sums are fused into one instruction.
        assert torch.equal(actual.isfinite(), expected.isfinite())
    else:
        assert_near(actual, expected, ulp)


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_special_functions_convert_integers(library: Library, name: str) -> None:
    x = torch.arange(-40, 40, dtype=torch.int32)
    assert torch.equal(library(f"{name} torch.int32", x), library(f"{name} torch.float32", x.float()))
