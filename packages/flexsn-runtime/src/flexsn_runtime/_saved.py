"""Saved tensors of a backward, with a clear error if an earlier backward has freed them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexsn_runtime.errors import FreedGraphError


def saved_of(ctx: Any) -> tuple[Tensor, ...]:
    """Returns `ctx.saved_tensors`.

    Raises:
        FreedGraphError: an earlier backward has freed them.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "second time" not in str(error):  # another error, such as one about a write in place
            raise
        raise FreedGraphError from error
    return saved
