"""Training steps in CUDA graphs: recorded once, repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from flexsn_nn._checks import check_count, check_module, check_name
from flexsn_nn.errors import ParameterError
from flexsn_nn.graphs._capture import CapturedStep
from flexsn_nn.graphs._step import TrainingStep

__all__ = ["STATES", "CapturedStep", "capture"]

STATES = ("reset", "carry")
"""Where a step begins: at initial states, or at those of the step before, cut off from its graph."""


def capture(
    net: nn.Module,
    loss: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    states: str = "reset",
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    max_norm: float | None = None,
    before_update: Callable[[], object] | None = None,
    max_graphs: int = 8,
    generators: Sequence[torch.Generator] = (),
) -> CapturedStep:
    """A training step that runs as a CUDA graph: forward, loss, backward, clipping and the optimizer's step.

    The first calls run as they are, and are training steps of yours; then the step is recorded, and calls repeat it
    without Python. There is a graph for each kind of calls: shapes, strides and dtypes of the tensors, values of other
    arguments, settings of torch, the network, its loss and its optimizer as they are. After a change of any of these a
    call runs as it is, and the next one is recorded. On the CPU every call is a plain one, with the same results.

    A step, or the optimizer's part of it, that cannot be recorded runs by Python: `CaptureWarning` says so once, with
    the module and the line, and `explain()` at any time.

    Args:
        net: the network; its parameters are trained in place.
        loss: `loss(output, *others)`: the loss, `[]`; or a tuple whose first it is, or a dict with the key `"loss"`.
        optimizer: `None`: the step ends with the gradients, which are added to those that parameters have.
        states: `"reset"`: neurons begin at their initial state, and forget it after the step; `"carry"`: at that of the
            step before, without its graph (truncated backpropagation through time). `functional.reset_net` between two
            steps begins a new sequence.
        scaler: scales the loss, and steps the optimizer.
        autocast: dtype for `torch.autocast` over forward and loss; `None`: as the caller has it.
        max_norm: clips the norm of the optimizer's gradients.
        before_update: called after the backward, before the optimizer's step; in the graph, with it.
        max_graphs: kinds of calls that are kept; of more, the least recently used are dropped. They share one pool of
            memory.
        generators: random number generators of the GPU, besides torch's own, from which the step draws.

    Returns:
        `step(inputs, *others)`, which returns the loss function's result, detached. A parameter's `grad` is the
        gradient of the latest step, in memory that the next one overwrites.

    Raises:
        UnknownNameError: other `states`.
        ParameterError: numbers out of their range, or a `scaler`, `max_norm` or `before_update` without an optimizer.

    Example:
        >>> from flexsn_nn import LIF
        >>> net = nn.Sequential(nn.Linear(8, 16), LIF(), nn.Linear(16, 3))
        >>> step = capture(
        ...     net,
        ...     lambda out, labels: nn.functional.cross_entropy(out.mean(0), labels),
        ...     torch.optim.SGD(net.parameters(), lr=0.1),
        ... )
        >>> step(torch.rand(4, 2, 8), torch.tensor([0, 2])).shape
        torch.Size([])
        >>> step.explain()
        'plain calls: the network is on cpu, where steps are plain calls'
    """
    check_module("net", net)
    check_name("states", states, STATES)
    check_count("max_graphs", max_graphs)
    if not callable(loss):
        raise TypeError(f"loss is a {type(loss).__name__}; give a function of the network's output, or a module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give an optimizer of torch.optim, or None.")
    if max_norm is not None and not max_norm > 0:
        raise ParameterError(f"max_norm is {max_norm}; wanted a number greater than 0.")
    if optimizer is None:
        given = {"scaler": scaler, "max_norm": max_norm, "before_update": before_update}
        for name, value in given.items():
            if value is not None:
                raise ParameterError(
                    f"{name} needs an optimizer: without one the step ends with the gradients, and the rest is yours."
                )
    step = TrainingStep(net, loss, optimizer, scaler, states == "carry", autocast, max_norm, before_update)
    return CapturedStep(step, max_graphs, tuple(generators))
