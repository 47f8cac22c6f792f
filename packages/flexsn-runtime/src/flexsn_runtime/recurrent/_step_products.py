"""Products of one step on tensor cores: float32 values in three parts, multiplied by a matrix that stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.products import compile_real_product, real_product, split, why_slow_product

_PARTS = 3
# Of a matrix's numbers, and of a step's rows: smaller matrices take as long as a launch does, and a library computes
# many rows at its full speed.
_FEWEST_NUMBERS, _MOST_ROWS = 1 << 18, 1024


@dataclass(frozen=True)
class StepProduct:
    """Products `out[t] = values[t] @ matrix + row` of a step."""

    values: Sequence[Tensor]
    matrix: Tensor
    row: Tensor | None
    out: Sequence[Tensor]

    @staticmethod
    def of(values: Sequence[Tensor], matrix: Tensor, row: Tensor | None, out: Sequence[Tensor]) -> StepProduct | None:
        """Products of these operands; `None`: a library computes them as fast, or has to.

        Where float32's precision is lowered by a setting, a library follows it.
        """
        if not _pays(values[0], matrix) or not all(_fits(tensor) for tensor in (*values[:2], *out[:2])):
            return None
        if row is not None:
            if row.dim() != 1 or row.dtype != torch.float32:
                return None
            row = row.contiguous()
        return StepProduct(values, matrix, row, out)

    def run(self) -> Callable[[int], None]:
        """Returns what computes the product of a step."""
        pieces = split(self.matrix.t(), _PARTS)
        return lambda t: real_product(self.values[t], pieces, self.row, self.out[t])

    def compile(self) -> None:
        """Compiles it, without a launch."""
        compile_real_product(self.values[0], self.matrix.t(), self.row, self.out[0])


def _pays(value: Tensor, matrix: Tensor) -> bool:
    if triton_interpreted() or value.dtype != torch.float32 or not value.is_cuda or value.dim() != 2:
        return False
    if matrix.numel() < _FEWEST_NUMBERS or value.shape[0] > _MOST_ROWS:
        return False
    return torch.get_float32_matmul_precision() == "highest" and why_slow_product(value.device) is None


def _fits(tensor: Tensor) -> bool:
    """True for what is dense and begins where loads of several numbers may."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
