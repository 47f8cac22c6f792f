"""What touches private parts of torch. Seen working on torch 2.11 and 2.13."""

from __future__ import annotations

import torch


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records what is called."""
    return torch._C._get_tracing_state() is not None


def recomputation() -> tuple[int, int] | None:
    """Which recomputation this thread is in: a forward in a backward pass, for the node that needs its results.

    `None`: in none.
    """
    backward_pass = torch._C._current_graph_task_id()
    if backward_pass == -1:
        return None
    node = torch._C._current_autograd_node()
    return backward_pass, -1 if node is None else node._sequence_nr()
