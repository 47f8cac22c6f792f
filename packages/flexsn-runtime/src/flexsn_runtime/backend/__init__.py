"""Backends: one object per kernel language, with everything that runs kernels in this language."""

from __future__ import annotations

from flexsn_runtime.backend._backend import Backend
from flexsn_runtime.backend._registry import (
    BACKENDS,
    TargetName,
    backend_on,
    register_backend,
    target_on,
    why_unavailable,
)

__all__ = ["BACKENDS", "Backend", "TargetName", "backend_on", "register_backend", "target_on", "why_unavailable"]
