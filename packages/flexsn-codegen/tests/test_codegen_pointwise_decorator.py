"""`pointwise` can decorate functions and methods, which keep their names, copies and gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import AutogradError, TraceError, UnsupportedOpError, pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.linspace(-2, 2, 15, device=DEVICE).view(3, 5)


@pointwise
def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Twice as much."""
    return x * factor


@pointwise(precision="float32", name="other")
def named(x: Tensor) -> Tensor:
    return x + 1


class Gate(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, device=DEVICE))

    @pointwise
    def gate(self, x: Tensor) -> Tensor:
        """Scales."""
        return torch.sigmoid(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


def test_decorated_function_looks_like_its_function() -> None:
    assert torch.equal(doubled(X), X * 2)
    assert torch.equal(doubled(X, factor=3.0), X * 3)
    assert (doubled.__name__, doubled.__doc__, doubled.__module__) == ("doubled", "Twice as much.", __name__)
    assert list(inspect.signature(doubled).parameters) == ["x", "factor"]
    assert doubled.__wrapped__(X, 2.0).equal(X * 2)
    assert named.__name__ == "other"
    assert torch.equal(named(X), X + 1)
    assert doubled.source(X).name.startswith("doubled_kernel_")


def test_decorated_function_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy(doubled) is doubled
    other: Any = pointwise(doubled.__wrapped__)
    assert copy.copy(other) is not other  # the name of its function belongs to another function


def test_methods_read_their_own_instance() -> None:
    a, b = Gate(2.0), Gate(3.0)
    for module in (a, b, copy.deepcopy(a), pickle.loads(pickle.dumps(b))):
        x = X.clone().requires_grad_()
        y = module(x)
        torch.testing.assert_close(y, torch.sigmoid(x) * module.scale)
        gradients = torch.autograd.grad(y.sum(), [x, module.scale])
        expected = torch.autograd.grad((torch.sigmoid(x) * module.scale).sum(), [x, module.scale])
        for actual, true in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual, true)
    assert a.gate is a.gate
    assert a.gate is not b.gate
    assert Gate.gate.__doc__ == "Scales."
    assert list(a.state_dict()) == ["scale"]
    copied = copy.deepcopy(a)
    with torch.no_grad():
        copied.scale.fill_(7.0)
        torch.testing.assert_close(copied(X), torch.sigmoid(X) * 7)
        torch.testing.assert_close(a(X), torch.sigmoid(X) * 2)


def test_methods_do_not_keep_their_instance_alive() -> None:
    module = Gate(2.0)
    module(X)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


def test_gradients_exist_unless_autograd_is_false() -> None:
    x = X.clone().requires_grad_()
    (actual,) = torch.autograd.grad(doubled(x).sum(), x)
    assert torch.equal(actual, torch.full_like(X, 2.0))
    refusing = pointwise(lambda x: x * 2, autograd=False)
    with pytest.raises(AutogradError, match=r"made with autograd=False"):
        refusing(x)
    with torch.no_grad():
        assert torch.equal(refusing(x), X * 2)


stored: list[Tensor] = []


def keeps(x: Tensor) -> Tensor:
    stored.append(x * 2)
    return x + stored[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rand_like(x),
        lambda x: x * random.random(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.sum(0),
        lambda x: x.flip(0) * 2,
        lambda x: x.cumsum(-1),
        lambda x: x + torch.arange(5, device=x.device),
        lambda x: x + x.transpose(0, 1),
        lambda x: x.t().contiguous().view(-1) * 2,
        keeps,
    ],
)
def test_errors_do_not_mention_steps(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((TraceError, UnsupportedOpError)) as raised:
        pointwise(function)(X)
    message = str(raised.value).partition("\n")[0]
    assert not re.search(r"\b(core|steps?|states?|input sequences?)\b", message), message
