"""Runs a core under `torch.autocast`, so that its operations convert their arguments as they do in a loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from flexsn_runtime._torch_private import is_any_autocast


def autocast_now(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of `torch.autocast` for tensors on `device`; `None` if autocast is off."""
    if not is_any_autocast():
        return None
    kind = device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


@cache
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def under_autocast(core: Callable[..., Any], device: torch.device, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Returns a function that calls `core` under autocast to `dtype`, independent of the caller's autocast settings.

    If `dtype` is `None`, returns `core` itself.
    """
    return core if dtype is None else partial(_call_under_autocast, core, device.type, dtype)


def _call_under_autocast(core: Callable[..., Any], kind: str, dtype: torch.dtype, *values: Any) -> Any:
    with torch.autocast(kind, dtype=dtype):
        return core(*values)
