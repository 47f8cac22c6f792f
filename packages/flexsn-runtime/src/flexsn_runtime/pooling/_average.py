"""Average pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime._torch_private import SingleLevelFunction, is_batched, transform_at_work
from flexsn_runtime.pooling import _launch
from flexsn_runtime.pooling._window import Window, is_channels_last, memory_format, why_no_kernel


def average_pool(x: Tensor, window: Window, divisor: int | None = None, *, pads: bool = True) -> Tensor:
    """Computes `torch.nn.functional.avg_pool2d`, but saves no tensor for the backward. PyTorch saves the input.

    Args:
        x: `[N, C, H, W]`. PyTorch's function runs instead if no kernel can run, as `why_no_kernel` reports; if `x` is
            an instance of a subclass; if `divisor` is 0; in compiled graphs, for which compilers generate a kernel; and
            inside of transforms of `torch.func`.
        window: the window, without dilation.
        divisor: divisor of each sum; `None` to divide by the number of positions in the window of the sum.
        pads: True if positions in the padding count toward this number.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or divisor == 0
        or why_no_kernel(x, window) is not None
        or transform_at_work() is not None
    ):
        return F.avg_pool2d(x, window.size, window.stride, window.padding, window.ceil, pads, divisor)
    if x.requires_grad and torch.is_grad_enabled():
        pooled: Tensor = _AveragePool.apply(x, window, divisor or 0, pads)
        return pooled
    return _launch.average(x.detach(), window, divisor or 0, pads=pads)


class _AveragePool(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window, divisor: int, pads: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.window, ctx.divisor, ctx.pads = window, divisor, pads
        ctx.shape, ctx.last = tuple(x.shape), is_channels_last(x)
        return _launch.average(x, window, divisor, pads=pads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        window, pads = ctx.window, ctx.pads
        if torch.is_grad_enabled() or transform_at_work() is not None or is_batched(grad):
            template = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(ctx.shape)  # gives only the shape
            template = template.contiguous(memory_format=memory_format(ctx.last))
            of_input = torch.ops.aten.avg_pool2d_backward(
                grad, template, window.size, window.stride, window.padding, window.ceil, pads, ctx.divisor or None
            )
        else:
            of_input = _launch.gradient(grad, None, ctx.shape, window, ctx.divisor, last=ctx.last, pads=pads)
        return of_input, None, None, None
