"""Recurrences for the tests of `scan`, and a loop as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Step = Callable[[Any, Any], tuple[Any, Any]]


def looped(
    step: Step, init: Any, xs: Any = None, *, length: int | None = None, reverse: bool = False, dim: int = 0
) -> tuple[Any, Any]:
    """Computes `scan` as a hand-written loop, for at least one step."""
    sequences = [leaf for leaf in tree_leaves(xs) if leaf is not None]
    steps = sequences[0].shape[dim] if sequences else length
    assert isinstance(steps, int)
    carry, ys = init, []
    for t in reversed(range(steps)) if reverse else range(steps):
        carry, y = step(carry, tree_map(lambda leaf, t=t: None if leaf is None else leaf.select(dim, t), xs))
        ys.append(y)
    if reverse:
        ys.reverse()
    by_leaf = zip(*map(tree_leaves, ys), strict=True)
    stacked = iter([None if leaves[0] is None else torch.stack(leaves, dim) for leaves in by_leaf])
    return carry, tree_map(lambda _: next(stacked), ys[0])


def moving_average(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mean = mean + 0.1 * (x - mean)
    return mean, mean


class MinimalGRU(torch.nn.Module):
    """A cell with one gate and matrices, which returns the state, and a summary of the state with another shape."""

    def __init__(self, inputs: int = 3, hidden: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        self.gate_x, self.gate_h = draw(inputs, hidden), draw(hidden, hidden)
        self.new_x, self.new_h = draw(inputs, hidden), draw(hidden, hidden)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        gate = torch.sigmoid(x @ self.gate_x + h @ self.gate_h)
        new = torch.tanh(x @ self.new_x + (gate * h) @ self.new_h)
        h = (1 - gate) * h + gate * new
        return h, {"h": h, "largest": h.argmax(-1), "norm": h.square().sum()}


class Belief(NamedTuple):
    mean: Tensor
    variance: Tensor


def kalman(belief: Belief, x: dict[str, Tensor]) -> tuple[Belief, tuple[Tensor, None]]:
    """Filters a random walk that is observed at each step with noise of a known variance."""
    predicted = belief.variance + 0.5
    gain = predicted / (predicted + x["noise"])
    mean = belief.mean + gain * (x["seen"] - belief.mean)
    return Belief(mean, (1 - gain) * predicted), (mean, None)


def running_logsumexp(carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = torch.maximum(carry["largest"], x)
    total = carry["total"] * (carry["largest"] - largest).exp() + (x - largest).exp()
    return {"largest": largest, "total": total}, largest + total.log()


def counting(carry: list[Any], x: None) -> tuple[list[Any], Tensor]:
    power, nothing, count = carry
    return [power * 0.5, nothing, count + 1], power[0] * count


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Recurrence(NamedTuple):
    name: str
    step: Step
    init: Any
    xs: Any
    options: dict[str, Any]


def recurrences(steps: int) -> Iterator[Recurrence]:
    """Yields new steps and tensors each time, all in float64."""
    yield Recurrence("moving_average", moving_average, draw(2, 3), draw(steps, 2, 3), {})
    yield Recurrence("backwards", moving_average, draw(2, 3), draw(2, steps, 3), {"dim": 1, "reverse": True})
    yield Recurrence("minimal_gru", MinimalGRU(), draw(2, 4), draw(2, 3, steps), {"dim": -1})
    belief = Belief(draw(5), draw(5).square() + 1)
    xs = {"seen": draw(steps, 5, seed=1), "noise": draw(steps, 5, seed=2).square() + 0.1}
    yield Recurrence("kalman", kalman, belief, xs, {"length": steps})
    start = {"largest": torch.full((4,), -1e3, dtype=torch.float64), "total": draw(4).square()}
    yield Recurrence("logsumexp", running_logsumexp, start, draw(steps, 4), {"reverse": True})
    init = [draw(3), None, torch.tensor(0)]
    yield Recurrence("counting", counting, init, None, {"length": steps})
    yield Recurrence("map", lambda carry, x: ((), (x.exp(), x.sum())), (), draw(3, steps), {"dim": -1})


RECURRENCES = [recurrence.name for recurrence in recurrences(1)]


def recurrence(name: str, steps: int) -> Recurrence:
    return next(case for case in recurrences(steps) if case.name == name)


def float_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]


def loss(results: Any) -> Tensor:
    """Returns a weighted sum of all differentiable results."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in float_leaves(results):
        weight = torch.arange(leaf.numel(), dtype=torch.float64).cos().reshape(leaf.shape)
        total = total + (leaf * weight).sum()
    return total


def parameters_of(step: Any) -> list[Tensor]:
    return list(step.parameters()) if isinstance(step, torch.nn.Module) else []
