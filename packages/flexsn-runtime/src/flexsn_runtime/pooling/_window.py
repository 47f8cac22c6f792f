"""The windows of a pooling operation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_runtime.backend import why_unavailable

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A kernel contains code for each position of a window.
_MOST_POSITIONS = 64
_MOST_ROWS = 2**31 - 2**16


class Window(NamedTuple):
    """The windows that a pooling operation reads. All attributes except `ceil` are `(height, width)`.

    Attributes:
        size: size of a window.
        stride: distance from one window to the next.
        padding: padding on both sides.
        dilation: distance from one position of a window to the next.
        ceil: True if a last window may extend beyond the padded image.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil: bool = False

    @property
    def positions(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def bits(self) -> int:
        """Number of bits that identify a position of a window: 2, 4 or 8."""
        return 2 if self.positions <= 4 else 4 if self.positions <= 16 else 8

    def out_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the result."""
        dimensions = zip((height, width), *self[:4], strict=True)
        down, across = (_count_windows(*numbers, self.ceil) for numbers in dimensions)
        return down, across

    @property
    def numbers(self) -> tuple[int, ...]:
        """Integer arguments of kernels: height and width of each attribute."""
        return tuple(number for pair in self[:4] for number in pair)


def _count_windows(length: int, size: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    room = length + 2 * padding - dilation * (size - 1) - 1
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    # The last window has to begin in the image or in the padding before it.
    return count - 1 if ceil and (count - 1) * stride >= length + padding else count


def why_no_kernel(x: Tensor, window: Window) -> str | None:
    """Returns the reason why PyTorch has to pool `x [N, C, H, W]`; `None` if a kernel can pool it."""
    if x.dtype not in _DTYPES:
        return f"its input is {x.dtype}"
    reason = why_unavailable(x.device)
    if reason is not None:
        return f"on the CPU there is no kernel for it: {reason}" if x.device.type == "cpu" else reason
    if x.dim() != 4:
        return f"its input has {x.dim()} dimensions"
    if window.positions > _MOST_POSITIONS:
        return f"its windows have {window.positions} positions, and at most {_MOST_POSITIONS} are possible"
    fits = all(n >= 1 for pair in (window.size, window.stride, window.dilation) for n in pair) and all(
        0 <= p <= n // 2 for p, n in zip(window.padding, window.size, strict=True)
    )
    if not fits or min(window.out_size(*x.shape[2:])) < 1:
        return "its windows do not fit"
    if 0 in x.shape:
        return "its input is empty"
    samples, channels, *_ = x.shape
    for height, width in (x.shape[2:], window.out_size(*x.shape[2:])):
        if max(samples * height * width, (samples * channels + 8) * height) > _MOST_ROWS:
            return "its input is too large"
    return None


def is_channels_last(x: Tensor) -> bool:
    """True if the results for `x` are channels-last, like the results of PyTorch's pooling."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def memory_format(last: bool) -> torch.memory_format:
    return torch.channels_last if last else torch.contiguous_format


def codes_shape(shape: tuple[int, int, int, int], last: bool, bits: int) -> tuple[int, int]:
    """Returns the shape of the uint8 codes for a result of this shape."""
    rows, columns = matrix(shape, last)
    codes_per_byte = 8 // bits
    return (rows + codes_per_byte - 1) // codes_per_byte, columns


def matrix(shape: tuple[int, int, int, int], last: bool) -> tuple[int, int]:
    """Returns the numbers of rows and columns of the matrix that a tensor `[N, C, H, W]` forms in memory."""
    samples, channels, height, width = shape
    return (samples * height * width, channels) if last else (samples * channels, height * width)
