"""Surrogates with snnTorch's names: comparison with snnTorch in arguments, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import Leaky, surrogate

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

snntorch = pytest.importorskip("snntorch")
theirs: Any = snntorch.surrogate
ours: Any = surrogate

# The points include the threshold, and both sides of the corners.
POINTS = [-3.0, -1.0, -0.25, -1e-6, 0.0, 1e-6, 0.25, 0.75, 1.0, 1.25, 3.0]
CALLS: list[tuple[str, tuple[float, ...], dict[str, float]]] = [
    ("atan", (), {}),
    ("atan", (1.5,), {}),
    ("atan", (), {"alpha": 3.0}),
    ("fast_sigmoid", (), {}),
    ("fast_sigmoid", (10,), {}),
    ("fast_sigmoid", (), {"slope": 25}),
    ("sigmoid", (), {}),
    ("sigmoid", (5,), {}),
    ("sigmoid", (), {"slope": 2.5}),
    ("triangular", (), {}),
    ("triangular", (0.5,), {}),
    ("triangular", (), {"threshold": 2}),
    ("straight_through_estimator", (), {}),
    ("heaviside", (), {}),
    ("spike_rate_escape", (), {}),
    ("spike_rate_escape", (2,), {}),
    ("spike_rate_escape", (2, 3), {}),
    ("spike_rate_escape", (2,), {"slope": 3.0}),
    ("spike_rate_escape", (), {"slope": 3.0}),
    ("SFS", (), {}),
    ("SFS", (10, 0.5), {}),
    ("SFS", (), {"slope": 10, "B": 0.25}),
]


def run(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    spikes = function(leaf)
    (gradient,) = torch.autograd.grad((spikes * weights).sum(), leaf)
    return spikes.detach().to(x.dtype), gradient


def assert_equal_surrogates(
    function: Callable[[Tensor], Tensor], expected_function: Callable[[Tensor], Tensor]
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        x = torch.tensor(POINTS, dtype=dtype)
        weights = 0.5 + torch.arange(len(POINTS), dtype=dtype) / 8  # exact in float32, the dtype of snnTorch's spikes
        spikes, gradient = run(function, x, weights)
        expected, expected_gradient = run(expected_function, x, weights)
        assert torch.equal(spikes, expected)
        torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(("name", "positional", "named"), CALLS)
def test_equal_calls_return_equal_surrogates(name: str, positional: tuple[float, ...], named: dict[str, float]) -> None:
    assert_equal_surrogates(getattr(ours, name)(*positional, **named), getattr(theirs, name)(*positional, **named))


def test_all_surrogates_of_snntorch_are_tested() -> None:
    """Checks all names except SSO, which draws random values in the backward, and two that other tests cover."""
    factories = {n for n, f in vars(theirs).items() if callable(f) and not isinstance(f, type) and n[0] != "_"}
    assert factories - {name for name, *_ in CALLS} == {"SSO", "LSO", "custom_surrogate"}
    assert not hasattr(surrogate, "SSO")


def test_lso_equals_its_documentation() -> None:
    """Compares with the documentation, since LSO of snnTorch 1.0 fails: it calls a function with too few arguments."""
    with pytest.raises(TypeError):
        theirs.LSO(0.2)(torch.zeros(1))

    def compute_by_hand(x: Tensor) -> Tensor:
        fires = (x > 0).to(x.dtype)
        slope = fires + (1 - fires) * 0.2
        return fires + (slope * x - (slope * x).detach())

    assert_equal_surrogates(surrogate.LSO(slope=0.2), compute_by_hand)


def test_a_custom_surrogate_equals_that_of_snntorch() -> None:
    def clip_gradient(x: Tensor, grad: Tensor, spikes: Tensor) -> Tensor:
        return (grad / (10 * x.abs() + 1.0) ** 2 + 0.125 * spikes).clamp(max=0.75)

    function = surrogate.custom_surrogate(clip_gradient)
    assert_equal_surrogates(function, theirs.custom_surrogate(clip_gradient))
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    results = []
    for backend in ("torch", "triton"):
        leaf = x.clone().requires_grad_()
        spikes = Leaky(beta=0.5, spike_grad=function, strict=None, backend=backend)(leaf)
        results.append((spikes.detach(), *torch.autograd.grad((spikes * x).sum(), leaf)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_wide_surrogates_do_not_overflow() -> None:
    """Checks a documented difference: snnTorch's gradient is NaN, since `exp(100)` is infinite in float32."""
    x = torch.tensor([-4.0], requires_grad=True)
    assert torch.autograd.grad(theirs.sigmoid()(x).sum(), x)[0].isnan().all()
    assert torch.autograd.grad(surrogate.sigmoid()(x).sum(), x)[0].item() == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.sigmoid(alpha=4.0), "snnTorch's parameter is slope"),
        (lambda: ours.sigmoid(torch.zeros(1), slope=4.0), "slope belongs to the call without x"),
        (lambda: ours.triangular(alpha=4.0), "snnTorch's parameter is threshold"),
        (lambda: ours.triangular(torch.zeros(1), threshold=4.0), "threshold belongs to the call without x"),
        (lambda: ours.fast_sigmoid(10, slope=10), "given twice"),
    ],
)
def test_calls_with_x_and_calls_with_options_are_not_mixed(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_factory_with_strict_false_fires_at_the_threshold() -> None:
    assert surrogate.fast_sigmoid(slope=10).strict
    assert surrogate.fast_sigmoid(slope=10, strict=False) == surrogate.FastSigmoid(10)
