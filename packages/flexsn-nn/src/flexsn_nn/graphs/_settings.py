"""Settings of torch, of this thread and of a gradient scaler that are fixed when a graph is recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable

import torch


def settings(device: torch.device, scaler: torch.amp.GradScaler | None) -> Hashable:
    """Returns a key of the settings that determine the kernels of an operation, and of the settings of a scaler."""
    kind = device.type
    cudnn = torch.backends.cudnn
    scaler_settings: Hashable = None
    if scaler is not None:
        scaler_settings = (
            scaler.is_enabled(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        getattr(getattr(cudnn, "conv", None), "fp32_precision", None),
        scaler_settings,
    )


def draws(device: torch.device) -> dict[str, object]:
    """Returns, by name, the states of random generators whose draws a graph cannot repeat."""
    states: dict[str, object] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if device.type != "cpu":
        states["torch's CPU generator"] = bytes(torch.get_rng_state().tolist())
    return states
