"""Backends. A backend is an object that compiles and launches the kernels of one language."""

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
