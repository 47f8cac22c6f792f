"""Compiled steps may contain operators that can draw random numbers, if the call draws none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hop_alone import no_kernels  # noqa: F401  a fixture
from torch import Tensor, nn

from flexsn_hop import errors, scan

# torch.cond issues this warning.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Part = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def attention(h: Tensor, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=dropout)[0]


def branch(h: Tensor, training: bool) -> Tensor:
    result: Tensor = torch.cond(h.sum() > 0, lambda h: F.dropout(h, 0.5, training) + 1, lambda h: h * 2, (h,))
    return result


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True).eval()
DETERMINISTIC: dict[str, Part] = {
    "Dropout in eval": nn.Dropout(0.5).eval(),
    "AlphaDropout in eval": nn.AlphaDropout(0.5).eval(),
    "Dropout1d in eval": nn.Dropout1d(0.5).eval(),
    "FeatureAlphaDropout in eval": nn.FeatureAlphaDropout(0.5).eval(),
    "RReLU in eval": nn.RReLU().eval(),
    "MultiheadAttention in eval": lambda h: ATTENTION(h, h, h)[0],
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "dropout in place": lambda h: F.dropout(h * 2, 0.5, training=False, inplace=True),
    "dropout of nothing": lambda h: F.dropout(h, 0.0, training=True),
    "dropout of all": lambda h: F.dropout(h, 1.0, training=True),
    "native_dropout": lambda h: torch.native_dropout(h, 0.5, False)[0],
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.3, training=False),
    "attention": lambda h: attention(h, 0.0),
    "branch": lambda h: branch(h, False),
}


@pytest.mark.long(all_but=["Dropout in eval-False", "attention-True", "RReLU in eval-True", "branch-False"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_call_without_random_numbers_is_compiled(name: str, training: bool) -> None:
    part = DETERMINISTIC[name]

    def run(init: Tensor, xs: Tensor) -> Tensor:
        return scan(lambda h, x: (part(h) + x, None), init, xs)[0]

    generator = torch.Generator().manual_seed(0)
    init, xs = torch.randn(3, 4, generator=generator), torch.randn(5, 3, 4, generator=generator)
    init.requires_grad_(training)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(training):
        expected, actual = run(init, xs), compiled(init, xs)
        torch.testing.assert_close(actual, expected)
        if training:
            gradients = [torch.autograd.grad(y.square().sum(), init) for y in (actual, expected)]
            torch.testing.assert_close(*gradients)


DRAWING: dict[str, Part] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "native_dropout": lambda h: torch.native_dropout(h, 0.5, None)[0],
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.3, training=True),
    "attention": lambda h: attention(h, 0.5),
    "bernoulli": lambda h: torch.bernoulli(torch.zeros_like(h), 0.0),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "branch": lambda h: branch(h, True),
    "scan": lambda h: scan(lambda a, b: (a + torch.rand(4), None), h[0], h)[0] + h,
}


@pytest.mark.long(all_but=["dropout", "branch"])
@pytest.mark.parametrize("name", DRAWING)
def test_call_with_random_numbers_is_refused(name: str) -> None:
    part = DRAWING[name]
    run = torch.compile(
        lambda init, xs: scan(lambda h, x: (part(h) + x, None), init, xs)[0], fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(errors.RandomOpError, match=r"draws random numbers \(File .*test_hop_draws.py"):
        run(torch.randn(3, 4), torch.randn(5, 3, 4))
