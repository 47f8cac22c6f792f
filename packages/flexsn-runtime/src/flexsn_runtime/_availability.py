"""Checks whether Triton is installed or interpreted, and on which devices it can run."""

from __future__ import annotations

import torch

try:
    # `INTERPRETED` is set when Triton is imported, and never changes. Every call reads this constant, which takes no
    # time in eager mode or under torch.compile.
    from flexsn_codegen.targets.triton.device import INTERPRETED as _INTERPRETED

    _INSTALLED = True
except ImportError:
    _INTERPRETED = _INSTALLED = False


def triton_interpreted() -> bool:
    """True if Triton runs in its interpreter, on CPU tensors."""
    return _INTERPRETED


def kernel_device() -> torch.device:
    """Returns the device of compiled kernels; the CPU if no such device exists, so that steps can still be traced."""
    return torch.device("cuda" if torch.cuda.is_available() and not _INTERPRETED else "cpu")


def why_no_triton(device: torch.device) -> str | None:
    """Returns the reason why Triton kernels cannot run on `device`, with a remedy; `None` if kernels can run."""
    if not _INSTALLED:
        return "Triton is not installed. Run `pip install triton` (Linux), or use backend='torch'."
    if device.type == "cpu" and not triton_interpreted():
        return (
            "the tensors are on the CPU, and compiled kernels run on a GPU. Move them (`.to('cuda')`), use "
            "backend='torch', or, to test kernels without a GPU, set TRITON_INTERPRET=1 before triton is "
            "imported."
        )
    if device.type == "cuda" and triton_interpreted():
        return (
            "Triton's interpreter is on, which runs kernels on CPU tensors only. Unset TRITON_INTERPRET, or "
            "move the tensors to the CPU."
        )
    if device.type not in ("cpu", "cuda"):
        return f"there are no compiled kernels for {device.type!r} tensors. Use backend='torch'."
    return None
