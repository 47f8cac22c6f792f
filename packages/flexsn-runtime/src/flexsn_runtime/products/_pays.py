"""Selects the GPUs on which products with spikes pay off."""

from __future__ import annotations

import functools
import statistics

import torch

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.backend import why_unavailable

# Size of the product that is measured. Any GPU computes it in a fraction of a millisecond.
_ROWS, _FEATURES = 8192, 1024
# Compute capabilities of GPUs on which bfloat16 is at least eight times as fast as float32, so no measurement
# is necessary.
_FAST = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
_FEWEST = 1 << 27


def fewest_multiplications() -> int:
    """Returns the number of multiplications below which the launches take longer than the product."""
    return 0 if triton_interpreted() else _FEWEST


def why_slow_product(device: torch.device) -> str | None:
    """Returns the reason why products in parts do not pay off on a device; `None` if they pay off.

    Each GPU is measured at most once.
    """
    return None if triton_interpreted() else _find_why_slow(device)


@functools.cache
def _find_why_slow(device: torch.device) -> str | None:
    if device.type != "cuda" or why_unavailable(device) is not None:
        return f"no compiled kernels on {device.type}"
    if torch.cuda.get_device_capability(device) in _FAST:
        return None
    parts_ms, float32_ms = _measure(device)
    if parts_ms < float32_ms:
        return None
    name = torch.cuda.get_device_name(device)
    return (
        f"on {name}, three bfloat16 products take {parts_ms:.2f} ms, and one float32 product takes {float32_ms:.2f} ms"
    )


def _measure(device: torch.device) -> tuple[float, float]:
    """Measures the milliseconds of a product in three parts, and of torch's product."""
    from flexsn_runtime.products._linear import forward

    s = torch.ones(_ROWS, _FEATURES, device=device)
    weight = torch.ones(_FEATURES, _FEATURES, device=device)
    settings = torch.backends.cuda.matmul
    precision, settings.fp32_precision = settings.fp32_precision, "ieee"
    try:
        medians = []
        for run in (lambda: forward(s, weight, None, 3), lambda: s @ weight.t()):
            times = []
            for _ in range(6):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            medians.append(statistics.median(times[1:]))
    finally:
        settings.fp32_precision = precision
    return medians[0], medians[1]
