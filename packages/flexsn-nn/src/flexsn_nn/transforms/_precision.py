"""Implements `precision="float32"`: half-precision sequences with a membrane in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flexsn_nn.transforms._transform import Changed, Core, Own, Transform, Values

Precision = Literal["eager", "float32"]
PRECISIONS: tuple[Precision, ...] = ("eager", "float32")

_NARROW = frozenset({torch.float16, torch.bfloat16})


class InFloat32(Transform):
    """Widens arguments to float32. Rounds outputs to the first input's dtype if that is float16 or bfloat16.

    All backends convert in the same way. Only float16 and bfloat16 arguments are widened.
    """

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns float32 for float16 and bfloat16, and other dtypes unchanged."""
        return _widen_dtype(dtype)

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Computes one step in float32."""
        outputs, new_states = core(tuple(map(_widen, inputs)), tuple(map(_widen, states)))
        dtype = inputs[0].dtype
        if dtype in _NARROW:
            outputs = tuple(t.to(dtype) if t.dtype == torch.float32 else t for t in outputs)
        return Changed(outputs, new_states)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(_widen_dtype(tensor.dtype))


def _widen_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _NARROW else dtype
