"""`precision="float32"`: half-precision sequences through a membrane that is kept in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["eager", "float32"]
PRECISIONS: tuple[Precision, ...] = ("eager", "float32")

_NARROW = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class InFloat32:
    """`core` with its arguments widened to float32, and its outputs rounded to the first input's dtype.

    As it is a core itself, it means the same on every backend. Arguments other than float16 and bfloat16 are
    left as they are.
    """

    core: Callable[..., Any]
    num_outputs: int

    @property
    def __name__(self) -> str:
        return getattr(self.core, "__name__", type(self.core).__name__)

    def __call__(self, *primals: Tensor) -> Any:
        returned = self.core(*[widened(t) for t in primals])
        if primals[0].dtype not in _NARROW:
            return returned
        values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        outputs = [t.to(primals[0].dtype) if t.dtype == torch.float32 else t for t in values[: self.num_outputs]]
        return (*outputs, *values[self.num_outputs :])


def widened(tensor: Tensor) -> Tensor:
    """`tensor`, in float32 if it is float16 or bfloat16."""
    return tensor.to(widened_dtype(tensor.dtype))


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16; others as they are."""
    return torch.float32 if dtype in _NARROW else dtype
