"""What touches private parts of torch. Seen working on torch 2.11 and 2.13."""

from __future__ import annotations

import torch

OUTSIDE = -1


def backward_pass() -> int:
    """The number of the backward pass that this thread is in, or `OUTSIDE`: a forward that runs in one is a
    recomputation."""
    return torch._C._current_graph_task_id()
