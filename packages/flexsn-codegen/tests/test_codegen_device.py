"""The two implementations of the functions that generated sources call."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexsn_codegen import pointwise
from flexsn_codegen.targets.triton import _functions, device

FOLDER = Path(device.__file__).parent
_prims = torch.ops.prims


def list_exports(name: str) -> set[str]:
    """Returns `__all__` of a module without an import, because only one of the two modules can be imported."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    if ast.unparse(value) == "EXPORTED":  # both implementations share one list
        return set(_functions.EXPORTED)
    assert isinstance(value, ast.List)
    names = {e.value for e in value.elts if isinstance(e, ast.Constant)}
    stars = [ast.unparse(e.value) for e in value.elts if isinstance(e, ast.Starred)]
    return {str(n) for n in names} | set(_functions.UNARY) if stars == ["UNARY"] else {str(n) for n in names}


def list_definitions(name: str) -> set[str]:
    return {n.name for n in ast.parse((FOLDER / f"{name}.py").read_text()).body if isinstance(n, ast.FunctionDef)}


def test_both_implementations_export_equal_names() -> None:
    assert list_exports("_compiled") == list_exports("_interpreted")


def test_each_compiled_function_is_defined_explicitly() -> None:
    assert list_exports("_compiled") - list_definitions("_compiled") == set()
    assert set(_functions.UNARY) <= list_definitions("_compiled")


def test_approximate_twins_exist() -> None:
    assert {f"fast_{name}" for name in _functions.FAST} == {
        n for n in list_exports("_compiled") if n.startswith("fast_")
    }


def test_all_names_in_generated_sources_exist() -> None:
    for name in list_exports("_compiled") | list_exports("_composed"):
        assert hasattr(device, name), name


def test_compiled_functions_call_their_libdevice_functions() -> None:
    tree = ast.parse((FOLDER / "_compiled.py").read_text())
    bodies = {n.name: ast.unparse(n.body[-1]) for n in tree.body if isinstance(n, ast.FunctionDef)}
    for name, (libdevice_name, _) in _functions.UNARY.items():
        in_float64 = f"return libdevice.{libdevice_name}(x.to(tl.float64)).to(x.dtype)"
        assert bodies[name] in (f"return libdevice.{libdevice_name}(x)", in_float64)


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.5,
    -2.5,
    3.5,
    1e-40,
    -1e-40,
    1e30,
    -1e30,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def list_special_values(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    edges = [info.max, info.min, info.tiny, info.eps]
    return torch.cat([torch.tensor(SPECIAL, dtype=torch.float64).to(dtype), torch.tensor(edges, dtype=dtype)])


def assert_same(actual: Tensor, expected: Tensor, ulp: float = 0.0) -> None:
    assert actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    # The tolerance is `ulp` units in the last place of the value, or of the smallest normal number for denormals.
    info = torch.finfo(expected.dtype)
    torch.testing.assert_close(actual, expected, rtol=ulp * info.eps, atol=ulp * info.tiny, equal_nan=True)
    zero = expected == 0
    assert torch.equal(torch.signbit(actual[zero]), torch.signbit(expected[zero]))


EXACT_UNARY = [
    "abs",
    "ceil",
    "exp",
    "floor",
    "isfinite",
    "log",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "sign",
    "tanh",
    "trunc",
    "expm1",
    "sqrt",
]
EXACT_BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "maximum",
    "minimum",
    "pow",
    "nextafter",
]


@pytest.mark.long(
    all_but=[
        "trunc-dtype2",
        "expm1-dtype1",
        "sqrt-dtype0",
        "abs-dtype1",
        "exp-dtype0",
        "floor-dtype1",
        "neg-dtype1",
        "ceil-dtype0",
        "log-dtype0",
        "tanh-dtype1",
        "sign-dtype2",
        "isfinite-dtype0",
        "log2-dtype0",
        "reciprocal-dtype2",
        "round-dtype2",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT_UNARY)
def test_unary_prims_are_exact_on_special_values(name: str, dtype: torch.dtype) -> None:
    op = getattr(_prims, name).default
    x = list_special_values(dtype)
    assert_same(pointwise(op)(x), op(x))


@pytest.mark.long(
    all_but=[
        "lt-dtype2",
        "add-dtype1",
        "sub-dtype0",
        "maximum-dtype2",
        "ne-dtype1",
        "ge-dtype0",
        "div-dtype2",
        "le-dtype0",
        "gt-dtype2",
        "eq-dtype0",
        "minimum-dtype2",
        "mul-dtype0",
        "pow-dtype1",
        "nextafter-dtype1",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT_BINARY)
def test_binary_prims_are_exact_on_all_pairs_of_special_values(name: str, dtype: torch.dtype) -> None:
    op = getattr(_prims, name).default
    x, y = torch.cartesian_prod(list_special_values(dtype), list_special_values(dtype)).unbind(1)
    actual, expected = pointwise(op)(x, y), op(x, y)
    if name in {"maximum", "minimum"}:
        # The sign of a zero may differ. In eager mode, too, the sign depends on the position in a vector.
        actual, expected = actual + 0.0, expected + 0.0
    assert_same(actual, expected, ulp=1.0 if name == "pow" else 0.0)


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def list_integer_pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    info = torch.iinfo(dtype)
    numbers = [0, 1, 2, 3, 7, 8, 31, 63, 64, 100, info.max, info.min, info.max - 1]
    numbers += [-1, -2, -7, -64] if info.min < 0 else []
    values = torch.tensor(numbers, dtype=dtype)
    x, y = torch.cartesian_prod(values, values).unbind(1)
    return x, y


@pytest.mark.long(
    all_but=[
        "add-dtype4",
        "sub-dtype0",
        "bitwise_and-dtype2",
        "lt-dtype3",
        "bitwise_xor-dtype1",
        "pow-dtype4",
        "fmin-dtype3",
        "shift_left-dtype2",
        "eq-dtype1",
        "mul-dtype3",
        "maximum-dtype1",
        "shift_right_arithmetic-dtype1",
    ]
)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "eq",
        "lt",
        "maximum",
        "fmin",
        "bitwise_and",
        "bitwise_xor",
        "shift_left",
        "shift_right_arithmetic",
        "pow",
    ],
)
def test_integer_prims_equal_eager_mode(name: str, dtype: torch.dtype) -> None:
    op = getattr(_prims, name).default
    x, y = list_integer_pairs(dtype)
    assert torch.equal(pointwise(op)(x, y), op(x, y))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("function", [torch.fmod, torch.remainder, torch.gcd, torch.floor_divide])
def test_integer_division_equals_eager_mode(function: object, dtype: torch.dtype) -> None:
    assert callable(function)
    x, y = list_integer_pairs(dtype)
    # In these cases, eager mode traps.
    defined = (y != 0) & (x != torch.iinfo(dtype).min) & (y != torch.iinfo(dtype).min) | (dtype == torch.uint8) & (
        y != 0
    )
    x, y = x[defined], y[defined]
    assert torch.equal(pointwise(function)(x, y), function(x, y))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_division_by_zero_does_not_trap(dtype: torch.dtype) -> None:
    x = list_integer_pairs(dtype)[0]
    zero = torch.zeros_like(x)
    assert torch.equal(pointwise(torch.fmod)(x, zero), zero)
    assert torch.equal(pointwise(torch.remainder)(x, zero), zero)
    assert torch.equal(pointwise(lambda x, y: torch.div(x, y, rounding_mode="trunc"))(x, zero), x)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_wrap(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    x = torch.tensor([0, 1, 5, top, top - 1], dtype=dtype)
    y = torch.tensor([1, top, 3, 2, top], dtype=dtype)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return _prims.add(x, y), _prims.sub(x, y), _prims.lt(x, y), _prims.div(x, y), _prims.bitwise_not(x)

    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    results = [r.tolist() for r in pointwise(function)(x, y)]
    assert results[0] == [(a + b) % (top + 1) for a, b in pairs]
    assert results[1] == [(a - b) % (top + 1) for a, b in pairs]
    assert results[2] == [a < b for a, b in pairs]
    assert results[3] == [a // b for a, b in pairs]
    assert results[4] == [top - a for a, _ in pairs]


def test_prims_of_bools_equal_eager_mode() -> None:
    x, y = (v.bool() for v in torch.cartesian_prod(torch.arange(2), torch.arange(2)).unbind(1))
    for name in [
        "add",
        "mul",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
    ]:
        op = getattr(_prims, name).default
        expected = (op(x.to(torch.int8), y.to(torch.int8)) != 0) if name not in {"add", "mul"} else op(x, y)
        assert torch.equal(pointwise(op)(x, y), expected), name
    assert torch.equal(pointwise(torch.logical_not)(x), ~x)


CONVERTIBLE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
]


@pytest.mark.parametrize("source", [*CONVERTIBLE, torch.float32])
def test_conversions_equal_eager(source: torch.dtype) -> None:
    if source.is_floating_point:
        x = torch.tensor([0.0, -0.0, 1.5, 2.5, -3.7, 100.7, 1e-7, 3.1e4, 1.00390625, 65519.0]).to(source)
    else:
        x = torch.tensor([0, 1, 2, 100, 127], dtype=torch.int64).to(source)
    targets = [d for d in (*CONVERTIBLE, torch.float32) if d != source]
    results = pointwise(lambda x: tuple(x.to(d) for d in targets))(x)
    for result, dtype in zip(results, targets, strict=True):
        narrow = not dtype.is_floating_point and dtype != torch.bool and torch.iinfo(dtype).bits == 8
        # Outside of the range, the result is undefined, as in eager mode.
        inside = (x.double().abs() < 100) & (x.double() >= (0 if dtype == torch.uint8 else -100)) | (not narrow)
        assert_same(result[inside], x.to(dtype)[inside])


def test_halves_are_rounded_as_in_eager_mode() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        x, y = torch.randn(2, 4096).to(dtype)

        def function(x: Tensor, y: Tensor) -> Tensor:
            return (x * y + y) / 3.0 - x * 0.1

        assert torch.equal(pointwise(function)(x, y), function(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0.3, x >= 0.3, x < 0.3, x <= 0.3, x == 0.3, x != 0.3),
        lambda x: (x > torch.full((), 0.3, device=x.device), torch.full((), 0.3, device=x.device) <= x),
        lambda x: (x.fmod(0.3), x.remainder(0.3), torch.remainder(0.3, x)),
        lambda x: (torch.nn.functional.hardshrink(x, 0.3), torch.where(x > 0.7, 0.3, x) + x),
        lambda x: (x.float() > 0.3, x.float() == 0.3),
    ],
)
def test_number_is_rounded_before_a_comparison_with_halves(
    function: Callable[[Tensor], tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    # 0.3 lies between two half values, and the comparison uses the nearer value.
    x = torch.tensor([0.3, -0.3, 0.7, 0.29, 0.31], dtype=dtype)
    for actual, expected in zip(pointwise(function, name="f")(x), function(x), strict=True):
        assert_same(actual, expected)


def test_float64_is_rounded_to_float32_before_halves() -> None:
    x = torch.tensor([1.0 + 2**-11 + 2**-40, 2049.0 + 2**-30], dtype=torch.float64)
    assert torch.equal(pointwise(lambda x: x.half())(x), x.half())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_frexp_equals_eager_mode(dtype: torch.dtype) -> None:
    x = list_special_values(dtype)
    for actual, expected in zip(pointwise(torch.frexp)(x), torch.frexp(x), strict=True):
        assert_same(actual, expected)


# Functions that this project implements, with arguments, and tolerances in ulp for float64 and float32.
COMPOSED = {
    torch.special.digamma: (torch.linspace(-5.3, 40, 500), 64.0, 64.0),
    torch.special.i0e: (torch.linspace(-200, 200, 801), 8.0, 4.0),
    torch.special.i1e: (torch.linspace(-200, 200, 801), 8.0, 16.0),  # torch's own float32 i1 is off by 6 ulp
    torch.special.spherical_bessel_j0: (torch.linspace(-3, 3, 301), 8.0, 4.0),
    torch.special.modified_bessel_k0: (torch.logspace(-20, 1.9, 301), 16.0, 8.0),
    torch.special.modified_bessel_k1: (torch.logspace(-20, 1.9, 301), 16.0, 8.0),
    torch.special.scaled_modified_bessel_k0: (torch.logspace(-20, 3, 301), 16.0, 8.0),
    torch.special.scaled_modified_bessel_k1: (torch.logspace(-20, 3, 301), 16.0, 8.0),
}


_WITH_ZEROS = {torch.special.digamma, torch.special.spherical_bessel_j0}


@pytest.mark.parametrize("function", COMPOSED, ids=lambda f: f.__name__)
def test_composed_functions_are_accurate(function: object) -> None:
    assert callable(function)
    points, ulp64, ulp32 = COMPOSED[function]
    for dtype, ulp in ((torch.float64, ulp64), (torch.float32, ulp32)):
        x = points.to(dtype)
        expected = function(x.double())
        error = (pointwise(function)(x).double() - expected).abs()
        # Near its zeros, the error of a function is relative to 1 / 4.
        floor = 0.25 if function in _WITH_ZEROS else torch.finfo(dtype).tiny
        unit = torch.finfo(dtype).eps * expected.abs().clamp(min=floor)
        assert (error / unit).max() <= ulp, function


def test_incomplete_gamma_functions_equal_eager_mode() -> None:
    edges = [0.0, 1e-10, 0.1, 0.5, 1.0, 3.0, 17.3, 100.0, 1000.0, 9999.0, 10001.0, 1e6, 1e12, math.inf, -1.0, math.nan]
    a = torch.tensor(edges, dtype=torch.float64)
    near = torch.tensor([0.9, 0.99, 0.999, 1.001, 1.01, 1.1], dtype=torch.float64)
    pairs = [torch.cartesian_prod(a, a), torch.cartesian_prod(a, near)]
    pairs[1] = torch.stack((pairs[1][:, 0], pairs[1].prod(1)), 1)
    order, x = torch.cat(pairs).unbind(1)
    for function in (torch.igamma, torch.igammac):
        actual, expected = pointwise(function)(order, x), function(order, x)
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9, equal_nan=True)


def test_gradient_of_an_incomplete_gamma_function_equals_eager_mode() -> None:
    a, x = torch.linspace(0.2, 5, 30), torch.linspace(0.1, 7, 30).requires_grad_()
    results = (f(a, x) for f in (torch.igammac, pointwise(torch.igammac, autograd=True)))
    expected, actual = (torch.autograd.grad(r.sum(), x)[0] for r in results)
    torch.testing.assert_close(actual, expected)


def test_zeta_and_polygamma_equal_eager_mode() -> None:
    s, q = torch.cartesian_prod(torch.tensor([1.5, 2.0, 3.0, 7.25]), torch.linspace(0.1, 30, 40)).double().unbind(1)
    torch.testing.assert_close(pointwise(torch.special.zeta)(s, q), torch.special.zeta(s, q), rtol=1e-13, atol=0)
    x = torch.linspace(0.2, 20, 50).double()
    for n in range(5):
        function = functools.partial(torch.polygamma, n)
        actual = pointwise(function, name="polygamma")(x)
        torch.testing.assert_close(actual, function(x), rtol=1e-12, atol=1e-14)
