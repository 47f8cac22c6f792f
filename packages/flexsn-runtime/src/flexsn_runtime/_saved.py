"""Access to the saved tensors of a backward, with a clear error if an earlier backward has freed the tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexsn_runtime.errors import FreedGraphError


def saved_of(ctx: Any) -> tuple[Tensor, ...]:
    """Returns `ctx.saved_tensors`.

    Raises:
        FreedGraphError: an earlier backward has freed the tensors.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "second time" not in str(error):  # another error, for example about a write in place
            raise
        raise FreedGraphError from error
    return saved
