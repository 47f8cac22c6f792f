"""A network whose every call begins at the initial states: a stage of a pipeline."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexsn_nn._checks import check_module
from flexsn_nn._leaf import Leaf
from flexsn_nn.functional import reset_net


class FromReset(Leaf):
    """Calls a network from the initial states of its neurons, every time, and keeps none afterwards.

    A pipeline (`torch.distributed.pipelining`) sends one micro-batch after the other through a stage. They are
    different samples, and none may begin at the state in which the one before it ended.

    Args:
        net: the network, or the part of it that is the stage.

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
        """Calls `net` from the initial states, and returns its result."""
        reset_net(self.net)
        try:
            return self.net(*args, **kwargs)
        finally:
            reset_net(self.net)
