"""The precision that a user has set for float32 products on a GPU, through either of PyTorch's two interfaces."""

from __future__ import annotations

import torch


def float32_precision() -> str:
    """Returns the precision `"highest"`, `"high"` or `"medium"`; see `torch.set_float32_matmul_precision`.

    `torch.get_float32_matmul_precision` raises an error if the precision was set through `torch.backends`.
    """
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "highest"
    try:
        return "medium" if torch.get_float32_matmul_precision() == "medium" else "high"
    except RuntimeError:
        return "high"
