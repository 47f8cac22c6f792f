"""Exact products with spikes, which replace a layer's own `forward` in calls where they are faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._replaced_forwards import ReplacedForward
from flexsn_nn._torch_private import constant, is_exporting
from flexsn_nn.exact._exchange import has_hooks_after, has_hooks_before, offer_links, written_of
from flexsn_nn.exact._grid import is_on_grid
from flexsn_nn.exact._on_grid import grid_of
from flexsn_nn.memory._ranges import Unknown, WholeRange, scaled_range_of
from flexsn_runtime import (
    RepeatedProducts,
    fewest_multiplications,
    float32_precision,
    spike_linear,
    transform_at_work,
    why_slow_product,
    why_unavailable,
)

PRECISIONS = ("highest", "high", "medium", "exact")
_PARTS = {"highest": 3, "high": 2, "medium": 1}
# Maximum number of bits, sign included, of whole numbers that one bfloat16 number can represent.
_BITS_OF_ONE_PART = 9
# One bfloat16 number can represent each whole number up to this limit.
_LARGEST = 1 << 8


class ExactForward(ReplacedForward):
    """Forward of a linear layer or a convolution of size 1. The layer's attribute `forward` holds this object.

    Args:
        layer: `nn.Linear`, or a convolution of size 1 in one to three dimensions.
        precision: one of `PRECISIONS`; `None` for torch's setting.
        input_ranges: range of the input according to the network's `forward`, in evaluation and in training; `None` if
            unknown.
        is_declared: True if the user has declared that the input consists of spikes.
        reads: if the input comes unchanged from a neuron, the layer and the modules that contain it; otherwise `None`.
        links: if only a neuron reads the output, the layer and the modules that contain it; otherwise `None`.

    Attributes:
        last: same as in `ReplacedForward`. For an exact product, `last` contains the number of parts for the weight and
            for gradients.
    """

    def __init__(
        self,
        layer: nn.Module,
        precision: str | None,
        input_ranges: tuple[WholeRange | None, WholeRange | None],
        *,
        is_declared: bool,
        reads: tuple[nn.Module, ...] | None = None,
        links: tuple[nn.Module, ...] | None = None,
    ) -> None:
        super().__init__(layer)
        self.reads, self.links = reads, links
        self.precision, self.input_ranges, self.is_declared = precision, input_ranges, is_declared
        self._record: Tensor | None = None
        self._grid: tuple[int, int, bool] | None = None
        # Layouts of the tensors in the last eager call, and the reason why torch's product runs for tensors with these
        # layouts.
        self._kind: tuple[object, ...] | None = None
        self._reason: str | None = None
        self._products = RepeatedProducts()
        # Scale of the input in the current call.
        self._scale = 1.0

    def __call__(self, input: Tensor) -> Tensor:
        """Computes the layer's output, like the layer's own `forward`."""
        layer = self.layer
        compiling = torch.compiler.is_compiling()
        weight: Tensor = layer.weight  # type: ignore[assignment]
        written = None
        if self.reads is not None and not compiling and input.dim() > 1 and not has_hooks_before(self.reads):
            written = written_of(input if isinstance(layer, nn.Linear) else input.movedim(1, -1))
        reason = self._why_not(input, written, weight, compiling)
        parts = None if reason is not None else self._count_parts(weight, compiling)
        if parts is None:
            if not compiling:
                self.last, self._record = (reason or _NO_GRID, False), None
            result: Tensor = type(layer).forward(layer, input)
            return result
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        if isinstance(layer, nn.Linear):
            y, record, ran = self._multiply(input, written, weight, bias, parts, compiling)
        else:
            x = input.movedim(1, -1)
            y, record, ran = self._multiply(x, written, weight.flatten(1), bias, parts, compiling)
            y = y.movedim(-1, 1)
        if not compiling:
            self.last, self._record = (parts, ran), record
        return y

    def _multiply(
        self,
        x: Tensor,
        written: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        parts: tuple[int, int],
        compiling: bool,
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Returns the product, a record of rows with numbers that are not whole, and True if the exact product ran."""
        if compiling or type(x) is not Tensor or transform_at_work() is not None:
            if self._scale != 1.0:
                return torch.nn.functional.linear(x, weight, bias), None, False
            y, record = spike_linear(x, weight, bias, *parts)
            return y, record, record is not None
        links = self.links
        product = self._products.run(
            x,
            written,
            weight,
            bias,
            parts,
            links=links is not None and not has_hooks_after(links),
            scale=self._scale,
        )
        if product.links is not None:
            offer_links(product.y, product.links)
        return product.y, product.record, True

    def account(self) -> tuple[str, bool]:
        """Describes the last call. Also returns True if an exact product ran. On a GPU, waits for that call."""
        outcome, ran = self.last
        text = outcome if isinstance(outcome, str) else _describe_parts(outcome)
        if self._record is not None and bool(self._record.any()):
            text += "; its input had numbers that are not whole, so rows were computed again in float32"
        if not self.was_called and any(self.input_ranges):
            low, high = next(input_range for input_range in self.input_ranges if input_range is not None)
            text += f"; its input consists of whole numbers from {low} to {high}"
        return text, ran

    def _why_not(self, x: Tensor, written: Tensor | None, weight: Tensor, compiling: bool) -> str | None:
        """Returns the reason why torch's product runs; `None` if the exact product can run.

        Args:
            written: spikes in bfloat16 that a neuron wrote in addition to `x`; `None` without these spikes.
        """
        if torch.is_autocast_enabled(x.device.type):
            return "under autocast"
        if not compiling:
            kind = x.shape, x.stride(), x.dtype, x.device, weight.dtype, weight.device
            if self._kind != kind:
                self._kind, self._reason = kind, self._why_never(x, weight, compiling)
            if self._reason is None and written is not None:
                self._scale = 1.0
                return None
            return self._why_unknown(x, compiling) if self._reason is None else self._reason
        return self._why_never(x, weight, compiling) or self._why_unknown(x, compiling)

    def _why_never(self, x: Tensor, weight: Tensor, compiling: bool) -> str | None:
        """Returns the reason why torch's product runs for all tensors with these layouts; `None` if there is none."""
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return f"its input is {x.dtype} and its weight {weight.dtype}; exact products need float32"
        if x.device != weight.device or x.dim() == 0:
            return "its input and its weight do not match"
        reason = why_unavailable(x.device)
        if reason is not None:
            cpu = "on the CPU torch's product runs, which is exact for weights on a grid"
            return cpu if x.device.type == "cpu" else reason
        if compiling and is_exporting():
            return "exported programs contain only torch's operators"
        if not isinstance(self.layer, nn.Linear):
            if x.dim() != weight.dim():
                return "its input has no batch dimension"
            if not x.movedim(1, -1).is_contiguous():
                return "its input is not channels-last in memory"
        if x.shape[-1 if isinstance(self.layer, nn.Linear) else 1] != weight.shape[1]:
            return "its input and its weight do not match"
        if x.numel() * weight.shape[0] < _get_fewest():
            return "too small: launches would take longer than the product"
        return _why_slow(x.device)

    def _why_unknown(self, x: Tensor, compiling: bool) -> str | None:
        self._scale = 1.0
        if self.is_declared:
            return None
        input_range: WholeRange | None = self.input_ranges[self.layer.training]
        if not compiling and x.grad_fn is not None:
            scaled_range = scaled_range_of(x)
            if isinstance(scaled_range, Unknown):
                operation = f": {scaled_range.reason} computes it from spikes" if scaled_range.reason else ""
                return f"its input does not consist of spikes{operation}"
            input_range, self._scale = scaled_range
        if input_range is None:
            return "its input is not known to consist of spikes"
        if max(-input_range.low, input_range.high) > _LARGEST:
            return f"its input has whole numbers from {input_range.low} to {input_range.high}; the limit is {_LARGEST}"
        return None

    def _count_parts(self, weight: Tensor, compiling: bool) -> tuple[int, int] | None:
        """Returns the number of parts for the weight and for gradients; `None` for `"exact"` without a grid."""
        precision = self.precision
        gradient_parts = _PARTS[_read_torch_precision() if precision is None or precision == "exact" else precision]
        grid = grid_of(self.layer)
        if grid is not None:
            return (1 if grid.bits <= _BITS_OF_ONE_PART else 2), gradient_parts
        if precision != "exact":
            return gradient_parts, gradient_parts
        return (2, gradient_parts) if not compiling and self._is_still_on_grid(weight) else None

    def _is_still_on_grid(self, weight: Tensor) -> bool:
        """True if the weight is still on a grid after its parametrization was removed. Checks each new weight once."""
        key = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self._grid is None or self._grid[:2] != key:
            self._grid = (*key, is_on_grid(weight.flatten(1)))
        return self._grid[2]


# Compilers treat the results of these functions as constants.


@constant
def _get_fewest() -> int:
    return fewest_multiplications()


@constant
def _why_slow(device: torch.device) -> str | None:
    return why_slow_product(device)


@constant
def _read_torch_precision() -> str:
    """Returns the precision that the user has set for torch's float32 products."""
    return float32_precision()


_NO_GRID = "its weight is not on a grid: flexsn_nn.on_grid(layer)"
_PRECISION_BY_PARTS = {1: "8 bits", 2: "16 bits", 3: "float32"}


def _describe_parts(parts: tuple[int, int]) -> str:
    weight_parts, gradient_parts = parts
    return (
        f"exact products; weight in {weight_parts} part{'s' if weight_parts > 1 else ''}, gradients in "
        f"{gradient_parts} ({_PRECISION_BY_PARTS[gradient_parts]})"
    )


def why_no_product(layer: nn.Module) -> str | None:
    """Returns the reason why a layer always uses torch's product; `None` if there is none."""
    kind: Any = type(layer)
    kinds: tuple[Any, ...] = (nn.Linear, *CONVOLUTIONS)
    base = next(candidate for candidate in kinds if isinstance(layer, candidate))
    if kind.forward is not base.forward or "forward" in vars(layer):
        return f"{kind.__name__} overrides forward"
    if base is not nn.Linear:
        extents = (layer.kernel_size, layer.stride, layer.dilation)
        if any(size != 1 for sizes in extents for size in sizes) or layer.groups != 1 or _has_padding(layer.padding):  # type: ignore[union-attr]
            return "not a convolution of size 1 without stride, groups and padding"
    return None


def _has_padding(padding: Any) -> bool:
    return padding not in ("same", "valid") and any(size != 0 for size in padding)


CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
