"""Checks that kernels can read the memory of a tensor. The error message names a remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_runtime.errors import LayoutError


def check_tensors(values: Sequence[object], label: str = "argument") -> None:
    """Raises `TypeError` or `LayoutError` unless all values are tensors in dense memory."""
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise TypeError(f"{label} {i} is a {type(value).__name__}; a scan takes tensors.")
        check_tensor(value, f"{label} {i}")


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raises `LayoutError` unless a tensor is in dense memory."""
    if tensor.is_quantized:
        noun, remedy = "quantized tensor", "Convert it: dequantize()."
    elif tensor.is_nested:
        noun, remedy = "nested tensor", "Convert it: torch.nested.to_padded_tensor()."
    elif tensor.layout is not torch.strided:
        noun, remedy = f"{tensor.layout} tensor", "Convert it: to_dense()."
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        noun, remedy = type(tensor).__name__, "Pass a plain tensor, or use backend='torch' or backend='hop'."
    elif tensor._is_zerotensor():
        noun, remedy = "tensor of zeros without memory", "Convert it: clone()."
    elif tensor.data_ptr() == 0 and tensor.numel() > 0 and not tensor.is_meta:
        noun, remedy = "tensor whose memory was freed", "Gather or load it before the call."
    else:
        return
    raise LayoutError(f"{name} is a {noun}; kernels read dense memory. {remedy}")
