"""Numbers in a graph that its kernels take as arguments, so that another number is no other kernel."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from flexsn_codegen._torch_private_ops import OpOverload

_prims = torch.ops.prims
LITERAL_OPS = frozenset({torch.ops.aten.scalar_tensor.default, _prims.scalar_tensor.default})
# Exponents that are written out as products and roots: eager mode does so, which rounds otherwise than a power.
WRITTEN_OUT = frozenset({2.0, 3.0, -1.0, -2.0, 0.5, -0.5})
# Larger whole exponents, up to this one, are products in float64, rounded once.
_LARGEST_PRODUCT = 16
_FORMATS = {torch.float32: "<f", torch.float64: "<d"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a kernel takes.

    A kernel's own arguments are whole numbers: a floating-point one may be narrower than it has to be (Triton's is
    float32). So they hold its bits.

    Attributes:
        name: in the source.
        dtype: that registers hold it in.
        value: what it is now, before it is rounded to `dtype`.
    """

    name: str
    dtype: torch.dtype
    value: bool | int | float

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's arguments for it: its 32 bits; or, of 64, the lower and the upper half."""
        return (f"{self.name}_low", f"{self.name}_high") if self.dtype.itemsize == 8 else (f"{self.name}_bits",)

    @property
    def integers(self) -> dict[str, int]:
        """The arguments, each a signed integer of 32 bits. Of a narrower integer they hold the value, not the bits."""
        return dict(zip(self.arguments, self.integers_of(self.value), strict=True))

    def integers_of(self, value: bool | int | float) -> list[int]:
        """The integers of another value, in the order of `arguments`."""
        bits = self._bits(value)
        return [_signed(bits), _signed(bits >> 32)] if self.dtype.itemsize == 8 else [_signed(bits)]

    def _bits(self, value: bool | int | float) -> int:
        if self.dtype == torch.bool:
            return int(bool(value))
        if not self.dtype.is_floating_point:
            return int(value)
        number, layout = float(value), _FORMATS[self.dtype]
        try:
            packed = struct.pack(layout, number)
        except OverflowError:  # of float32
            packed = struct.pack(layout, math.copysign(math.inf, number))
        return int.from_bytes(packed, "little")


def _signed(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def may_be_argument(op: OpOverload, position: int, value: bool | int | float, dtype: torch.dtype) -> bool:
    """True if a number that an op takes may come as a kernel's argument.

    Args:
        position: among the op's tensors and numbers.
        dtype: that the op computes in.
    """
    if op.namespace != "prims":
        return False  # it may be written otherwise for some numbers, as the degree of a polynomial
    is_exponent = op is _prims.pow.default and position == 1
    return not (is_exponent and (value in WRITTEN_OUT or is_product(value, dtype) or not dtype.is_floating_point))


def is_product(exponent: float, dtype: torch.dtype) -> bool:
    """True if a power by this number is computed as a product of float64, of which half and float32 are rounded."""
    whole = abs(exponent) if float(exponent).is_integer() else 0
    return 3 <= whole <= _LARGEST_PRODUCT and dtype != torch.float64


def reciprocal(divisor: float) -> float:
    """The reciprocal in float64, whatever the dtype, to be rounded once, as eager CUDA does."""
    return 1.0 / divisor if divisor else math.copysign(math.inf, divisor)
