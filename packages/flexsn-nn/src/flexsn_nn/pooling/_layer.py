"""A replacement for the forward of a pooling layer. The replacement runs a kernel if possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._replaced_forwards import ReplacedForward
from flexsn_nn._torch_private import is_exporting
from flexsn_runtime import Window, average_pool, max_pool, why_no_kernel

_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d)
KINDS = (*_MAXIMA, *_AVERAGES)
_OTHERS = (
    nn.MaxPool3d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d, nn.FractionalMaxPool2d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_BY_KERNEL = "by a kernel"


class PoolForward(ReplacedForward):
    """Replaced forward of a pooling layer. The class of the layer is one of `KINDS`, or derived from it."""

    def __call__(self, input: Tensor) -> Tensor:
        """Computes the layer's output: with a kernel if possible, otherwise with the layer's own `forward`."""
        layer: Any = self.layer
        images, window = _to_images(layer, input), window_of(layer)
        reason: str | None = f"its input has {input.dim()} dimensions"
        if images is not None:
            export_reason = "exported programs contain only torch's operators"
            reason = export_reason if is_exporting() else why_no_kernel(images, window)
        if not torch.compiler.is_compiling():
            self.last = (_BY_KERNEL, True) if reason is None else (reason, False)
        if images is None or reason is not None:
            result: Tensor = type(layer).forward(layer, input)
            return result
        if isinstance(layer, _MAXIMA):
            pooled = max_pool(images, window)
        else:
            divisor = getattr(layer, "divisor_override", None)
            pooled = average_pool(images, window, divisor, pads=layer.count_include_pad)
        return pooled if input.dim() == images.dim() else pooled.squeeze(-2)

    def account(self) -> tuple[str, bool]:
        """Returns a description of the last call, and True if a kernel ran."""
        return self.last


def window_of(layer: Any) -> Window:
    """Returns the window of a layer. The window of a layer in one dimension has one row."""
    flat = isinstance(layer, nn.MaxPool1d | nn.AvgPool1d)
    stride = layer.kernel_size if layer.stride is None else layer.stride
    return Window(
        _to_pair(layer.kernel_size, 1, flat=flat),
        _to_pair(stride, 1, flat=flat),
        _to_pair(layer.padding, 0, flat=flat),
        _to_pair(getattr(layer, "dilation", 1), 1, flat=flat),
        bool(layer.ceil_mode),
    )


def why_torch(layer: nn.Module) -> str | None:
    """Returns the reason why a layer always uses torch's pooling; `None` if it can use kernels."""
    kind: Any = type(layer)
    torch_class: Any = next((layer_class for layer_class in KINDS if isinstance(layer, layer_class)), None)
    if torch_class is None:
        return f"there is no kernel for {kind.__name__}"
    if kind.forward is not torch_class.forward or "forward" in vars(layer):
        return f"{kind.__name__} overrides forward"
    if getattr(layer, "return_indices", False):
        return "it returns indices"
    return None


def is_pooling(module: nn.Module) -> bool:
    """True for a pooling layer."""
    return isinstance(module, (*KINDS, *_OTHERS))


def _to_pair(sizes: Any, size_of_row: int, *, flat: bool) -> tuple[int, int]:
    if isinstance(sizes, int):
        return (size_of_row, sizes) if flat else (sizes, sizes)
    return (size_of_row, *sizes) if flat else tuple(sizes) * (2 // len(sizes))


def _to_images(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Returns `x` as `[N, C, H, W]`, with `H = 1` for pooling in one dimension; `None` if `x` is not a batch."""
    if isinstance(layer, nn.MaxPool1d | nn.AvgPool1d):
        return x.unsqueeze(-2) if x.dim() == 3 else None
    return x if x.dim() == 4 else None
