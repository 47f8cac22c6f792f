"""What touches private parts of torch. Seen working on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Of a thread that is in no operator and in no mode; as it is when this package is imported.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def as_outside() -> Iterator[None]:
    """For tracing where something of the caller's is switched on or off.

    Inside a custom op's implementation, dispatch keys are off that a trace needs; and what a trace saves for
    its own backward is nothing for the caller's saved-tensor hooks (activation checkpointing).
    """
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
