"""Recurrences for the benchmarks of `flexsn_hop.scan`, as steps that PyTorch's scan also accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence and its data.

    Attributes:
        step: function of one time step, or a module if the step has parameters.
        init: first carry, whose tensors require gradients.
        xs: sequences, with time as their first dimension. Floating-point sequences require gradients.
    """

    step: Any
    init: Any
    xs: Any


def make_leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


class EMA(nn.Module):
    """A moving average with a learned coefficient for each element."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.full((size,), -2.0))

    def forward(self, mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = mean + self.logit.sigmoid() * (x - mean)
        return mean, mean.clone()


def min_gru(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Computes a step of the minimal GRU of Feng et al., Were RNNs All We Needed? The gates and candidates are products
    that are computed before the scan.
    """
    gate = x[0].sigmoid()
    h = (1 - gate) * h + gate * x[1]
    return h, h.clone()


class RNN(nn.Module):
    """An Elman cell."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(size, size), nn.Linear(size, size, bias=False)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.x(x) + self.h(h))
        return h, h.clone()


class GRU(nn.Module):
    """PyTorch's GRU cell."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(size, size)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h, h.clone()


class HMM(nn.Module):
    """A step of the forward algorithm of a hidden Markov model, on logarithms of probabilities."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.transition = nn.Parameter(torch.randn(states, states))

    def forward(self, alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = alpha.unsqueeze(-1) + self.transition.log_softmax(-1)
        alpha = scores.logsumexp(-2) + x
        return alpha, alpha.logsumexp(-1)


def delta_net(memory: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Computes equations 23 to 25 of Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers."""
    query, key, value, rate = x
    old = torch.einsum("bvk,bk->bv", memory, key)
    memory = memory + torch.einsum("bv,bk->bvk", rate * (value - old), key)
    return memory, torch.einsum("bvk,bk->bv", memory, query)


class Kalman(nn.Module):
    """A step of a Kalman filter whose state is a vector."""

    def __init__(self, size: int, observed: int) -> None:
        super().__init__()
        self.transition = nn.Parameter(torch.eye(size) * 0.9 + 0.01 * torch.randn(size, size))
        self.observe = nn.Parameter(torch.randn(observed, size) / size**0.5)
        self.register_buffer("noise", torch.eye(size) * 0.1)
        self.register_buffer("observation_noise", torch.eye(observed))

    def forward(self, belief: Any, x: Tensor) -> tuple[Any, Tensor]:
        mean, covariance = belief
        mean = mean @ self.transition.T
        covariance = self.transition @ covariance @ self.transition.T + self.noise
        projected = self.observe @ covariance
        gain = torch.linalg.solve(projected @ self.observe.T + self.observation_noise, projected).mT
        error = x - mean @ self.observe.T
        mean = mean + (gain @ error.unsqueeze(-1)).squeeze(-1)
        covariance = covariance - gain @ projected
        return (mean, covariance), mean.clone()


def make(name: str, steps: int) -> Recurrence:
    """Returns the recurrence with this name, with random data."""
    torch.manual_seed(0)
    batch, size = 16, 64
    if name == "EMA":
        return Recurrence(EMA(size), make_leaf(batch, size), make_leaf(steps, batch, size))
    if name == "minGRU":
        return Recurrence(
            min_gru, make_leaf(batch, size), [make_leaf(steps, batch, size), make_leaf(steps, batch, size)]
        )
    if name == "RNN":
        return Recurrence(RNN(size), make_leaf(batch, size), make_leaf(steps, batch, size))
    if name == "GRU cell":
        return Recurrence(GRU(size), make_leaf(batch, size), make_leaf(steps, batch, size))
    if name == "HMM":
        return Recurrence(HMM(32), make_leaf(batch, 32), make_leaf(steps, batch, 32))
    if name == "DeltaNet":
        xs = [make_leaf(steps, batch, 16, scale=0.25) for _ in range(3)] + [make_leaf(steps, batch, 1, scale=0.25)]
        return Recurrence(delta_net, make_leaf(batch, 16, 16), xs)
    assert name == "matrix Kalman"
    covariance = torch.eye(6).repeat(batch, 1, 1).requires_grad_()
    return Recurrence(Kalman(6, 3), (make_leaf(batch, 6), covariance), make_leaf(steps, batch, 3))


NAMES = ("EMA", "minGRU", "RNN", "GRU cell", "HMM", "DeltaNet", "matrix Kalman")
