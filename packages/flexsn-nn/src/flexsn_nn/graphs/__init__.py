"""Training steps in CUDA graphs, which are recorded once and then repeated without Python."""

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
"""State at the beginning of a step: the initial state, or the detached state after the previous step."""


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
    """Returns a training step that runs as a CUDA graph: forward, loss, backward, clipping and the optimizer's step.

    The first calls run in Python, as ordinary training steps. Then the step is recorded, and later calls repeat it
    without Python. Each kind of call has its own graph. The kind depends on shapes, strides and dtypes of tensors, on
    the values of other arguments, on torch's settings, and on the network, its loss and its optimizer. After a change
    of any of these properties, one call runs in Python, and the next call is recorded. On the CPU, all calls run in
    Python, with the same results.

    If a step cannot be recorded, it runs in Python. If only the optimizer's part of the step cannot be recorded, only
    this part runs in Python. In both cases, a `CaptureWarning` gives the reason once, with the module and the line.
    `explain()` gives the reason at any time.

    Args:
        net: network, whose parameters are trained in place.
        loss: function `loss(output, *others)`. The result is the loss, a tensor of shape `[]`; or a tuple whose first
            item is the loss; or a dict with the loss under the key `"loss"`.
        optimizer: optimizer; `None` if the step only adds the gradients to the `grad` of the parameters.
        states: with `"reset"`, neurons begin with their initial state and drop their state after the step. With
            `"carry"`, they begin with the detached state after the previous step (truncated backpropagation through
            time). `functional.reset_net` between two steps begins a new sequence.
        scaler: scaler that scales the loss and calls the optimizer's step.
        autocast: dtype of `torch.autocast` during forward and loss; `None` for the caller's setting.
        max_norm: maximum norm of the gradients. Gradients with a larger norm are clipped to this norm. `None` for no
            clipping.
        before_update: function to call after the backward and before the optimizer's step. The graph contains this
            function if it contains the optimizer's step.
        max_graphs: largest number of graphs. With more kinds of calls, the least recently used graph is dropped. All
            graphs share one pool of memory.
        generators: generators on the GPU, other than torch's default generator, from which the step draws random
            numbers.

    Returns:
        `step(inputs, *others)`, which returns the detached result of the loss function. With an optimizer, the `grad`
        of a parameter is the gradient of the last step, in memory that the next step overwrites.

    Raises:
        UnknownNameError: `states` is unknown.
        ParameterError: `max_norm` or `max_graphs` is out of range, or `scaler`, `max_norm` or `before_update` is given
            without an optimizer.

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
        raise ParameterError(f"max_norm is {max_norm}; expected a number greater than 0.")
    if optimizer is None:
        optimizer_options = {"scaler": scaler, "max_norm": max_norm, "before_update": before_update}
        for name, value in optimizer_options.items():
            if value is not None:
                raise ParameterError(f"{name} needs an optimizer, without which the step ends after the backward.")
    step = TrainingStep(net, loss, optimizer, scaler, states == "carry", autocast, max_norm, before_update)
    return CapturedStep(step, max_graphs, tuple(generators))
