"""A network whose calls all begin with the initial states, for stages of a pipeline."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexsn_nn._checks import check_module
from flexsn_nn._leaf import Leaf
from flexsn_nn.functional import reset_net


class FromReset(Leaf):
    """A network that begins each call with the initial states of its neurons, and drops their states after the call.

    A pipeline (`torch.distributed.pipelining`) sends one micro-batch after another through a stage. Micro-batches
    contain different samples, so a micro-batch must not begin with the final states of the previous micro-batch.

    Args:
        net: network, or part of a network, that forms the stage.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> stage = FromReset(IF())
        >>> once, again = stage(torch.full((3, 1), 0.4)), stage(torch.full((3, 1), 0.4))
        >>> torch.equal(once, again)
        True
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        check_module("net", net)
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `net`, beginning with the initial states, and returns its result."""
        reset_net(self.net)
        try:
            return self.net(*args, **kwargs)
        finally:
            reset_net(self.net)
