"""Registry of the backends, and the choice of a backend for a device."""

from __future__ import annotations

from typing import Literal

import torch

from flexsn_runtime.backend._backend import Backend
from flexsn_runtime.backend._cpp import CppBackend
from flexsn_runtime.backend._triton import TritonBackend

TargetName = Literal["triton", "cpp"]

BACKENDS: dict[str, Backend] = {"triton": TritonBackend(), "cpp": CppBackend()}
"""All backends by name."""


def register_backend(backend: Backend) -> None:
    """Registers a backend under its name. Programs select the backend by passing the name as `on_cpu`.

    Raises:
        ValueError: another backend has this name.
    """
    if BACKENDS.setdefault(backend.name, backend) is not backend:
        raise ValueError(f"a backend with the name {backend.name!r} is already registered: choose another name.")


def target_on(device: torch.device, on_cpu: TargetName) -> TargetName:
    """Returns the name of the backend for a device.

    Args:
        on_cpu: name of the backend for tensors on the CPU. On the CPU, Triton runs in its interpreter.
    """
    return on_cpu if device.type == "cpu" else "triton"


def backend_on(device: torch.device, on_cpu: TargetName) -> Backend:
    """Returns the backend that `target_on` names."""
    return BACKENDS[target_on(device, on_cpu)]


def why_unavailable(device: torch.device, target: TargetName = "triton") -> str | None:
    """Returns the reason why compiled kernels cannot run on `device`, with a remedy; `None` if kernels can run.

    Args:
        target: the language of the kernels.
    """
    return BACKENDS[target].why_unavailable(device)
