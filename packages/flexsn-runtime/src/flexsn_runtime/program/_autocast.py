"""Autocast inside of a core. Some operations compute in float32, others in the widest dtype of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from flexsn_runtime._torch_private import is_any_autocast


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The dtype of `torch.autocast` for tensors on `device`; `None` if it is off."""
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
    """Returns a function that calls `core` under autocast to `dtype`. Settings of the caller do not affect the core."""
    return core if dtype is None else partial(_call, core, device.type, dtype)


def _call(core: Callable[..., Any], kind: str, dtype: torch.dtype, *values: Any) -> Any:
    with torch.autocast(kind, dtype=dtype):
        return core(*values)
