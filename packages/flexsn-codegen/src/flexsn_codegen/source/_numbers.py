"""Numbers of a graph that are arguments of its kernels, so that a change of a number does not need another kernel."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from flexsn_codegen._torch_private_ops import OpOverload

_prims = torch.ops.prims
LITERAL_OPS = frozenset({torch.ops.aten.scalar_tensor.default, _prims.scalar_tensor.default})
# Powers with these exponents are written as products, roots and quotients, as in eager mode: pow rounds differently.
WRITTEN_OUT = frozenset({2.0, 3.0, -1.0, -2.0, 0.5, -0.5})
# Powers with other integer exponents of at most this magnitude are float64 products, which are rounded once.
_LARGEST_PRODUCT = 16
_FORMATS = {torch.float32: "<f", torch.float64: "<d"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is an argument of a kernel.

    The kernel receives integers that contain the number's bits, because a floating-point argument may be too narrow (in
    Triton, such an argument is float32).

    Attributes:
        name: the number's name in the source.
        dtype: the number's dtype in registers.
        value: the number's current value, before it is rounded to `dtype`.
    """

    name: str
    dtype: torch.dtype
    value: bool | int | float

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the kernel's arguments for the number: its 32 bits, or the two halves of its 64 bits."""
        return (f"{self.name}_low", f"{self.name}_high") if self.dtype.itemsize == 8 else (f"{self.name}_bits",)

    @property
    def integers(self) -> dict[str, int]:
        """The kernel's arguments by name, as signed 32-bit integers. A bool or an integer is passed as its value."""
        return dict(zip(self.arguments, self.integers_of(self.value), strict=True))

    def integers_of(self, value: bool | int | float) -> list[int]:
        """The values of the kernel's arguments if the number is `value`, in the order of `arguments`."""
        bits = self._encode(value)
        return [_to_signed(bits), _to_signed(bits >> 32)] if self.dtype.itemsize == 8 else [_to_signed(bits)]

    def _encode(self, value: bool | int | float) -> int:
        if self.dtype == torch.bool:
            return int(bool(value))
        if not self.dtype.is_floating_point:
            return int(value)
        number, layout = float(value), _FORMATS[self.dtype]
        try:
            packed = struct.pack(layout, number)
        except OverflowError:  # the number is too large for float32
            packed = struct.pack(layout, math.copysign(math.inf, number))
        return int.from_bytes(packed, "little")


def _to_signed(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def may_be_argument(op: OpOverload, position: int, value: bool | int | float, dtype: torch.dtype) -> bool:
    """True if a number among the operands of an op may be an argument of the kernel.

    Args:
        position: position of the number among the op's tensors and numbers.
        dtype: the dtype in which the op computes.
    """
    if op.namespace != "prims":
        return False  # the op may be written differently for some numbers, such as the degree of a polynomial
    is_exponent = op is _prims.pow.default and position == 1
    return not (is_exponent and (value in WRITTEN_OUT or is_product(value, dtype) or not dtype.is_floating_point))


def is_product(exponent: float, dtype: torch.dtype) -> bool:
    """True if a power with this exponent is computed as a float64 product, which is then rounded."""
    magnitude = abs(exponent) if float(exponent).is_integer() else 0
    return 3 <= magnitude <= _LARGEST_PRODUCT and dtype != torch.float64


def reciprocal(divisor: float) -> float:
    """Computes the reciprocal in float64 for all dtypes. Like eager mode on CUDA, kernels round this result once."""
    return 1.0 / divisor if divisor else math.copysign(math.inf, divisor)
