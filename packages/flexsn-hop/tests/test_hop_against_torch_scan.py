"""Claims of `docs/why-not-torch-scan.md`, which compares PyTorch's scan with `scan`.

With every version of torch, `scan` is compared with the loop. With the version that the page covers, PyTorch's scan is
compared with the claims of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from scan_steps import looped
from torch import Tensor
from torch.func import grad, jvp, vmap

from flexsn_hop import scan
from flexsn_hop._torch_private import builtin_scan

# Torch's forward mode scripts its own formulas.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

SEEN_ON = "2.15"

Scan = Callable[..., tuple[Any, Any]]
X = torch.linspace(-1, 1, 12).cos().reshape(4, 3)
V = torch.zeros(3)


def twice_the_same(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    new = carry + x
    return new, new


def curved(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (carry * x).sin() + x, carry * 2


def last(run_scan: Scan, x: Tensor) -> Tensor:
    carry: Tensor = run_scan(curved, V, x)[0]
    return carry


def keys_in_another_order(run_scan: Scan) -> Any:
    carry, _ = run_scan(lambda c, x: ({"b": c["b"] * 2, "a": c["a"] + x}, None), {"a": V, "b": V + 1}, X)
    return carry["a"], carry["b"]


def second_derivative(run_scan: Scan) -> Any:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(last(run_scan, x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def two_lengths_of_y(run_scan: Scan) -> Any:
    return run_scan(lambda c, x: (c + x, (c * 2, c.sum())), V, X.t(), dim=1)


def no_length(run_scan: Scan) -> Any:
    return run_scan(lambda c, _: (c * 2, c.clone()), V, None)


def counter(run_scan: Scan) -> Any:
    x = X.clone().requires_grad_()
    init = (V, torch.tensor(0))
    (_, count), ys = run_scan(lambda c, x: ((c[0] * 0.5 + x, c[1] + 1), (c[0] + x) / (c[1] + 1)), init, x)
    return count, torch.autograd.grad(ys.sum(), x)


def dual(run_scan: Scan) -> Any:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(last(run_scan, forward_mode.make_dual(X, X.clone()))).tangent


def trained_by_inductor(run_scan: Scan) -> Any:
    weight = torch.eye(3).requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h, h.clone()

    def loss(x: Tensor) -> Tensor:
        total: Tensor = run_scan(step, x.new_zeros(1, 3), x[:, None])[1].sum()
        return total

    run = loss if run_scan is looped else torch.compile(loss, fullgraph=True)
    return torch.autograd.grad(run(X), weight)


def branch(run_scan: Scan) -> Any:
    return run_scan(lambda c, x: (c + x if x.sum() > 1 else c * 2, None), V, X)


@dataclass(frozen=True)
class Point:
    """A program of the page. `torchs` is its outcome with PyTorch's scan: an error's name, "wrong" or "silent"."""

    run: Callable[[Scan], Any]
    torchs: str


CAPTURE = "UncapturedHigherOrderOpError"
POINTS = {
    "keys in another order": Point(keys_in_another_order, "wrong"),
    "second derivative": Point(second_derivative, "wrong"),
    "y without the dimension": Point(two_lengths_of_y, "silent"),
    "no length": Point(no_length, "silent"),
    "y is the carry": Point(lambda run_scan: run_scan(twice_the_same, V, X), CAPTURE),
    "carry passed on": Point(lambda run_scan: run_scan(lambda c, x: (c, x * 2), V, X), CAPTURE),
    "x passed on": Point(lambda run_scan: run_scan(lambda c, x: (c + x, x), V, X), CAPTURE),
    "no carry": Point(lambda run_scan: run_scan(lambda c, x: ((), x.exp()), (), X), "RuntimeError"),
    "None in the carry": Point(
        lambda run_scan: run_scan(lambda c, x: ((c[0] + x, None), x), (V, None), X), "RuntimeError"
    ),
    "None in xs": Point(lambda run_scan: run_scan(lambda c, x: (c + x[0], c * 2), V, (X, None)), "RuntimeError"),
    "expanded init": Point(
        lambda run_scan: run_scan(lambda c, x: (c + x, c * 2), torch.zeros(1).expand(3), X), CAPTURE
    ),
    "counter in training": Point(counter, "TorchRuntimeError"),
    "forward mode": Point(dual, CAPTURE),
    "jvp": Point(lambda run_scan: jvp(lambda x: last(run_scan, x), (X,), (X,)), CAPTURE),
    "grad": Point(lambda run_scan: grad(lambda x: last(run_scan, x).sum())(X), "AssertionError"),
    "vmap": Point(lambda run_scan: vmap(lambda x: last(run_scan, x))(torch.stack([X, X])), "RuntimeError"),
    "training by Inductor": Point(trained_by_inductor, "BackendCompilerFailed"),
    "branch on data": Point(branch, CAPTURE),
}
REFUSED_HERE = {"y without the dimension": "ys\\[1\\] has 1 dimensions", "no length": "pass length"}


@pytest.mark.long(all_but=[name for name in POINTS if name != "training by Inductor"])
@pytest.mark.parametrize("name", POINTS)
def test_scan_equals_the_loop_or_refuses(name: str) -> None:
    torch._dynamo.reset()
    if name in REFUSED_HERE:
        with pytest.raises(ValueError, match=REFUSED_HERE[name]):
            POINTS[name].run(scan)
        return
    torch.testing.assert_close(POINTS[name].run(scan), POINTS[name].run(looped))


@pytest.mark.skipif(not torch.__version__.startswith(SEEN_ON), reason=f"the page speaks of torch {SEEN_ON}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("name", POINTS)
def test_torchs_scan_behaves_as_the_page_describes(name: str) -> None:
    torch._dynamo.reset()
    point = POINTS[name]
    assert builtin_scan is not None
    if point.torchs not in ("wrong", "silent"):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            point.run(builtin_scan)
        assert type(caught.value).__name__ == point.torchs
        return
    actual = point.run(builtin_scan)
    if point.torchs == "wrong":
        with pytest.raises(AssertionError):
            torch.testing.assert_close(actual, point.run(looped))
