"""Surrogates: an exact step function in the forward, and the formula of the table in the backward, on every backend."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexsn_graph import trace_step
from flexsn_nn import FlexSN, ParameterError, surrogate
from flexsn_nn.surrogate import Surrogate

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

Formula = Callable[[float], float]


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _sigmoid(a: float) -> Formula:
    return lambda x: a * _logistic(a * x) * _logistic(-a * x)


def _s2nn(a: float, b: float) -> Formula:
    return lambda x: _sigmoid(a)(x) if x < 0 else b / (x + 1)


def _tailed(a: float) -> Formula:
    return lambda x: a if x <= 0 else 1 if x <= 1 else 1 / x


def _fake(a: float) -> Formula:
    return lambda x: a if x == 0 else min(math.copysign(1, x) / x, a)


def _waves(n: int, t: float) -> Formula:
    return lambda x: 4 / t * sum(math.cos((2 * i - 1) * 2 * math.pi * x / t) for i in range(1, n + 1))


# Each row has the name of the function or "", the surrogate, and its formula in plain Python. Rows with default
# parameters are followed by rows with other parameters.
TABLE: list[tuple[str, Surrogate, Formula]] = [
    ("sigmoid", surrogate.Sigmoid(), _sigmoid(4.0)),
    ("sigmoid", surrogate.Sigmoid(1.5), _sigmoid(1.5)),
    ("atan", surrogate.ATan(), lambda x: 1 / (1 + (math.pi * x) ** 2)),
    ("atan", surrogate.ATan(3.0), lambda x: 1.5 / (1 + (math.pi / 2 * 3 * x) ** 2)),
    ("piecewise_quadratic", surrogate.PiecewiseQuadratic(), lambda x: max(0, 1 - abs(x))),
    ("piecewise_quadratic", surrogate.PiecewiseQuadratic(2.0), lambda x: max(0, 2 - 4 * abs(x))),
    ("triangular", surrogate.Triangular(0.5), lambda x: max(0, 0.5 - 0.25 * abs(x))),
    ("piecewise_exp", surrogate.PiecewiseExp(), lambda x: 0.5 * math.exp(-abs(x))),
    ("piecewise_exp", surrogate.PiecewiseExp(3.0), lambda x: 1.5 * math.exp(-3 * abs(x))),
    ("soft_sign", surrogate.SoftSign(), lambda x: 1 / (4 * (0.5 + abs(x)) ** 2)),
    ("soft_sign", surrogate.SoftSign(5.0), lambda x: 1 / (10 * (0.2 + abs(x)) ** 2)),
    ("super_spike", surrogate.SuperSpike(), lambda x: 1 / (1 + abs(x)) ** 2),
    ("super_spike", surrogate.SuperSpike(3.0), lambda x: 3 / (1 + abs(x)) ** 2),
    ("fast_sigmoid", surrogate.FastSigmoid(), lambda x: 1 / (1 + 25 * abs(x)) ** 2),
    ("fast_sigmoid", surrogate.FastSigmoid(2.0), lambda x: 1 / (1 + 2 * abs(x)) ** 2),
    ("", surrogate.SparseFastSigmoid(), lambda x: 1 / (1 + 25 * x) ** 2 if x > 1 else 0),
    ("", surrogate.SparseFastSigmoid(2.0, 0.5), lambda x: 1 / (1 + 2 * x) ** 2 if x > 0.5 else 0),
    ("", surrogate.Tent(), lambda x: 1 if x < 0 else -1),
    ("", surrogate.Tent(0.5), lambda x: 0.5 if x < 0 else -0.5),
    ("erf", surrogate.Erf(), lambda x: 2 / math.sqrt(math.pi) * math.exp(-4 * x * x)),
    ("erf", surrogate.Erf(0.5), lambda x: 0.5 / math.sqrt(math.pi) * math.exp(-0.25 * x * x)),
    ("nonzero_sign_log_abs", surrogate.NonzeroSignLogAbs(), lambda x: 1 / (1 + abs(x))),
    ("nonzero_sign_log_abs", surrogate.NonzeroSignLogAbs(4.0), lambda x: 1 / (0.25 + abs(x))),
    ("piecewise_leaky_relu", surrogate.PiecewiseLeakyReLU(), lambda x: 0.5 if abs(x) <= 1 else 0.01),
    (
        "piecewise_leaky_relu",
        surrogate.PiecewiseLeakyReLU(0.5, 0.1),
        lambda x: 1.0 if abs(x) <= 0.5 else 0.1,
    ),
    ("squarewave_fourier_series", surrogate.SquarewaveFourierSeries(), _waves(2, 8)),
    ("squarewave_fourier_series", surrogate.SquarewaveFourierSeries(4, 3.0), _waves(4, 3.0)),
    ("s2nn", surrogate.S2NN(), _s2nn(4.0, 1.0)),
    ("s2nn", surrogate.S2NN(2.0, 0.5), _s2nn(2.0, 0.5)),
    ("q_pseudo_spike", surrogate.QPseudoSpike(), lambda x: (1 + 2 * abs(x)) ** -2),
    ("q_pseudo_spike", surrogate.QPseudoSpike(3.5), lambda x: (1 + 2 * abs(x) / 2.5) ** -3.5),
    ("leaky_k_relu", surrogate.LeakyKReLU(), lambda x: 1 if x >= 0 else 0),
    ("leaky_k_relu", surrogate.LeakyKReLU(0.1, 2.0), lambda x: 2 if x >= 0 else 0.1),
    ("log_tailed_relu", surrogate.LogTailedReLU(), _tailed(0.0)),
    ("log_tailed_relu", surrogate.LogTailedReLU(0.2), _tailed(0.2)),
    ("fake_numerical_gradient", surrogate.FakeNumericalGradient(), _fake(0.3)),
    ("fake_numerical_gradient", surrogate.FakeNumericalGradient(2.0), _fake(2.0)),
    ("rect", surrogate.Rect(), lambda x: 1 if abs(x) < 0.5 else 0),
    ("rect", surrogate.Rect(2.0), lambda x: 2 if abs(x) < 0.25 else 0),
    ("straight_through", surrogate.StraightThrough(), lambda x: 1),
    ("tanh", surrogate.Tanh(), lambda x: 1 - math.tanh(x) ** 2),
    ("tanh", surrogate.Tanh(2.5), lambda x: 1 - math.tanh(2.5 * x) ** 2),
    ("spike_rate_escape", surrogate.SpikeRateEscape(), lambda x: 25 * math.exp(-abs(x - 1))),
    ("spike_rate_escape", surrogate.SpikeRateEscape(2.0, 3.0), lambda x: 3 * math.exp(-2 * abs(x - 1))),
]
EACH = pytest.mark.parametrize(("name", "function", "formula"), TABLE, ids=[repr(row[1]) for row in TABLE])
DEFAULTS = [row for row in TABLE if row[1] == type(row[1])()]

# Corners of the formulas, points on both sides of them, and distant points.
POINTS = [-40.0, -3.0, -1.0, -0.5, -0.25, -0.1, -0.0, 0.0, 1e-9, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 3.0, 40.0]


# These functions return surrogates and have no input. Other tests compare them with snnTorch.
FACTORIES = {"LSO", "SFS", "custom_surrogate", "heaviside", "straight_through_estimator"}


def test_every_surrogate_is_in_the_table() -> None:
    public = {name: getattr(surrogate, name) for name in surrogate.__all__ if name != "Surrogate"}
    functions = {row[0] for row in TABLE if row[0]}
    classes = {type(row[1]) for row in TABLE}
    assert {name for name, value in public.items() if not isinstance(value, type)} == functions | FACTORIES
    assert {value for value in public.values() if isinstance(value, type)} == classes
    assert {type(row[1]) for row in DEFAULTS} == classes


@EACH
def test_the_forward_is_the_step_and_the_backward_the_formula(name: str, function: Surrogate, formula: Formula) -> None:
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    spikes = function(x)
    assert spikes.tolist() == [1.0 if point >= 0 else 0.0 for point in POINTS]
    weights = torch.linspace(0.5, 2.0, len(POINTS), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((spikes * weights).sum(), x)
    expected = torch.tensor([formula(point) for point in POINTS], dtype=torch.float64)
    torch.testing.assert_close(gradient, weights * expected, rtol=1e-12, atol=1e-12)
    parameters = {k: v for k, v in vars(function).items() if k != "strict"}
    if not name:
        return
    spikes_of_call = getattr(surrogate, name)(x, **parameters)
    (gradient_of_call,) = torch.autograd.grad((spikes_of_call * weights).sum(), x)
    assert torch.equal(spikes_of_call, spikes)
    assert torch.equal(gradient_of_call, gradient)


@pytest.mark.parametrize(("name", "function", "formula"), DEFAULTS, ids=[type(row[1]).__name__ for row in DEFAULTS])
def test_surrogates_compare_strictly_keep_dtypes_and_are_equal_by_parameters(
    name: str, function: Surrogate, formula: Formula
) -> None:
    strict = type(function)(strict=True)
    x = torch.tensor(POINTS, requires_grad=True)
    assert strict(x).tolist() == [1.0 if point > 0 else 0.0 for point in POINTS]
    if name:
        assert torch.equal(getattr(surrogate, name)(x, strict=True), strict(x))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        narrow = x.detach().to(dtype).requires_grad_()
        spikes = function(narrow)
        assert spikes.dtype == dtype
        assert function.gradient(narrow).dtype == dtype
        (gradient,) = torch.autograd.grad(spikes.sum(), narrow)
        expected = torch.tensor([formula(point) for point in narrow.tolist()], dtype=torch.float64)
        precision = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(gradient.double(), expected, rtol=40 * precision, atol=precision)
    assert function != strict
    assert hash(function) == hash(type(function)())
    assert pickle.loads(pickle.dumps(strict)) == strict


def _core(function: Surrogate) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x
        s = function(h - 0.25)
        return s, h - s

    return core


def _backpropagate(formula: Formula, x: list[float], weights: list[float]) -> tuple[list[float], list[float]]:
    """Computes the spikes of `_core` for one element, and the gradient of their weighted sum, in plain Python."""
    v, distances, spikes = 0.0, [], []
    for value in x:
        h = 0.5 * v + value
        distances.append(h - 0.25)
        spikes.append(1.0 if h - 0.25 >= 0 else 0.0)
        v = h - spikes[-1]
    grad_v, gradient = 0.0, []
    for distance, weight in zip(reversed(distances), reversed(weights), strict=True):
        grad_h = grad_v + (weight - grad_v) * formula(distance)
        gradient.append(grad_h)
        grad_v = 0.5 * grad_h
    return spikes, gradient[::-1]


@pytest.mark.long(all_but=["Sigmoid", "ATan", "SquarewaveFourierSeries", "StraightThrough", "SpikeRateEscape"])
@pytest.mark.parametrize(("name", "function", "formula"), DEFAULTS, ids=[type(row[1]).__name__ for row in DEFAULTS])
def test_a_surrogate_in_a_core_is_traced_and_compiled(name: str, function: Surrogate, formula: Formula) -> None:
    core = _core(function)
    example = (torch.zeros(3), torch.zeros(3))
    vjp = trace_step(core, 1, 1, 1, example).vjp((True, True), (True, True))
    assert None not in vjp.gradients

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 40, generator=generator, dtype=torch.float64)
    # In the first step, h - 0.25 is one of the points, so it includes the corners.
    x[0, : len(POINTS)] = torch.tensor(POINTS, dtype=torch.float64) + 0.25
    weights = torch.randn(4, 40, generator=generator, dtype=torch.float64)

    def run(backend: str) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        neuron = FlexSN(core, 1, 1, 1, backend=backend)
        spikes = neuron(leaf)
        assert isinstance(spikes, Tensor)
        (gradient,) = torch.autograd.grad((spikes * weights).sum(), leaf)
        return spikes.detach(), gradient

    columns = [_backpropagate(formula, x[:, i].tolist(), weights[:, i].tolist()) for i in range(40)]
    spikes, gradient = (torch.tensor(values, dtype=torch.float64).T for values in zip(*columns, strict=True))
    assert 0.1 < spikes.mean() < 0.9
    for backend in ("torch", "hop", "triton"):
        output, output_gradient = run(backend)
        assert torch.equal(output, spikes)
        torch.testing.assert_close(output_gradient, gradient, rtol=1e-11, atol=1e-12)


def test_compiled_and_transformed_surrogates_have_the_gradient() -> None:
    function = surrogate.Sigmoid()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(gradient, expected)
    plain = x.detach()
    assert torch.equal(torch.func.grad(lambda x: function(x).sum())(plain), expected)
    assert torch.equal(torch.func.vmap(torch.func.grad(function))(plain), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: surrogate.Sigmoid(0.0), "alpha is 0; it must be above 0"),
        (lambda: surrogate.ATan(-1.0), "alpha is -1; it must be above 0"),
        (lambda: surrogate.Erf(math.inf), "alpha is not finite"),
        (lambda: surrogate.Tanh(0.0), "k is 0"),
        (lambda: surrogate.PiecewiseQuadratic(0.0), "alpha is 0"),
        (lambda: surrogate.PiecewiseExp(math.nan), "alpha is not finite"),
        (lambda: surrogate.SoftSign(0.0), "alpha is 0"),
        (lambda: surrogate.SuperSpike(-2.0), "alpha is -2"),
        (lambda: surrogate.FastSigmoid(0.0), "slope is 0"),
        (lambda: surrogate.NonzeroSignLogAbs(0.0), "alpha is 0"),
        (lambda: surrogate.PiecewiseLeakyReLU(w=0.0), "w is 0"),
        (lambda: surrogate.PiecewiseLeakyReLU(c=-0.1), "c is -0.1; it must be at least 0"),
        (lambda: surrogate.SquarewaveFourierSeries(0), "n is 0; it must be a whole number of at least 1"),
        (lambda: surrogate.SquarewaveFourierSeries(T=0.0), "T is 0"),
        (lambda: surrogate.S2NN(alpha=0.0), "alpha is 0"),
        (lambda: surrogate.S2NN(beta=0.0), "beta is 0"),
        (lambda: surrogate.QPseudoSpike(1.0), "alpha is 1; it must be above 1"),
        (lambda: surrogate.LeakyKReLU(leak=-1.0), "leak is -1"),
        (lambda: surrogate.LeakyKReLU(k=-1.0), "k is -1"),
        (lambda: surrogate.LogTailedReLU(-0.1), "alpha is -0.1"),
        (lambda: surrogate.FakeNumericalGradient(0.0), "alpha is 0"),
        (lambda: surrogate.Rect(0.0), "alpha is 0"),
        (lambda: surrogate.Tent(math.inf), "height is not finite"),
        (lambda: surrogate.SparseFastSigmoid(slope=0.0), "slope is 0"),
        (lambda: surrogate.SparseFastSigmoid(B=math.nan), "B is not finite"),
        (lambda: surrogate.SpikeRateEscape(beta=0.0), "beta is 0"),
        (lambda: surrogate.SpikeRateEscape(slope=0.0), "slope is 0"),
        (lambda: surrogate.Sigmoid(cast(float, "4")), "alpha is '4', a str; give a number"),
        (lambda: surrogate.sigmoid(torch.zeros(1), alpha=0.0), "alpha is 0"),
    ],
)
def test_a_parameter_out_of_range_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()
