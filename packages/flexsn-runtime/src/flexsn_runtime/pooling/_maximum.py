"""Max pooling: an autograd function, and operators for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime._torch_private import SingleLevelFunction, is_batched, transform_at_work
from flexsn_runtime.pooling import _launch
from flexsn_runtime.pooling._window import Window, codes_shape, is_channels_last, memory_format, why_no_kernel


def max_pool(x: Tensor, window: Window) -> Tensor:
    """Computes `torch.nn.functional.max_pool2d`.

    Values, gradients, memory formats and the choice among equal maxima are those of PyTorch. For the backward,
    this function saves 2, 4 or 8 bits for each element of the result, and not the input.

    Args:
        x: `[N, C, H, W]`. PyTorch's function runs instead if no kernel can run, as `why_no_kernel` reports; if `x` is
            an instance of a subclass; and inside of transforms of `torch.func`.
    """
    if why_no_kernel(x, window) is not None or type(x) not in (Tensor, torch.nn.Parameter):
        return _pool_by_torch(x, window)
    if torch.compiler.is_compiling():
        compiled: Tensor = max_pool_op(x, *map(list, window[:4]), window.ceil)[0]
        return compiled
    if transform_at_work() is not None:
        return _pool_by_torch(x, window)
    if x.requires_grad and torch.is_grad_enabled():
        pooled: Tensor = MaxPool.apply(x, window)
        return pooled
    return _launch.maximum(x.detach(), window, codes=False)[0]


def _pool_by_torch(x: Tensor, window: Window) -> Tensor:
    return F.max_pool2d(x, window.size, window.stride, window.padding, window.dilation, window.ceil)


def _find_places(codes: Tensor, shape: Sequence[int], out: Sequence[int], window: Window, last: bool) -> Tensor:
    """Computes each maximum's position in its plane, `[N, C, H' W']`, with PyTorch's operations."""
    samples, channels, _, width = shape
    down, across = out
    shifts = torch.arange(0, 8, window.bits, device=codes.device, dtype=torch.int32)
    code = (codes.int().unsqueeze(1) >> shifts[:, None]) & ((1 << window.bits) - 1)
    code = code.flatten(0, 1)[: samples * (down * across if last else channels)].long()
    if last:
        code = code.view(samples, down * across, channels).transpose(1, 2)
    code = code.reshape(samples, channels, down, across)
    rows = torch.arange(down, device=codes.device)[:, None] * window.stride[0] - window.padding[0]
    columns = torch.arange(across, device=codes.device) * window.stride[1] - window.padding[1]
    rows = rows + code // window.size[1] * window.dilation[0]
    columns = columns + code % window.size[1] * window.dilation[1]
    return (rows * width + columns).flatten(2)


def _compute_differentiable_gradient(
    grad: Tensor, codes: Tensor, shape: Sequence[int], window: Window, last: bool
) -> Tensor:
    """Computes the gradient of the input with PyTorch's operations, which are differentiable."""
    places = _find_places(codes, shape, grad.shape[2:], window, last)
    zeros = grad.new_zeros(*shape[:2], shape[2] * shape[3])
    return zeros.scatter_add(2, places, grad.flatten(2)).view(tuple(shape))


class MaxPool(SingleLevelFunction):
    """Max pooling by kernels. From the name of this node, flexsn-nn recognizes values that are computed from spikes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        y, codes = _launch.maximum(x, window, codes=True)
        assert codes is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes)
        ctx.window, ctx.shape, ctx.last = window, tuple(x.shape), is_channels_last(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None
        (codes,) = ctx.saved_tensors
        if torch.is_grad_enabled() or transform_at_work() is not None or is_batched(grad):
            return _compute_differentiable_gradient(grad, codes, ctx.shape, ctx.window, ctx.last), None
        return _launch.gradient(grad, codes, ctx.shape, ctx.window, last=ctx.last), None


# -- for compilers -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("flexsn::max_pool", mutates_args=())
def max_pool_op(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the result of `max_pool`, and codes for the positions of the maxima."""
    y, codes = _launch.maximum(x, _make_window(size, stride, padding, dilation, ceil), codes=True)
    assert codes is not None
    return y, codes


@max_pool_op.register_fake
def _(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> tuple[Tensor, Tensor]:
    window, last = _make_window(size, stride, padding, dilation, ceil), is_channels_last(x)
    samples, channels, height, width = x.shape
    shape = (samples, channels, *window.out_size(height, width))
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(last))
    return y, x.new_empty(codes_shape(shape, last, window.bits), dtype=torch.uint8)


@torch.library.custom_op("flexsn::max_pool_backward", mutates_args=())
def max_pool_backward_op(
    grad: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
    last: bool,
) -> Tensor:
    """Computes the gradient of the input of `max_pool`."""
    samples, channels, height, width = shape
    window = _make_window(size, stride, padding, dilation, ceil)
    return _launch.gradient(grad, codes, (samples, channels, height, width), window, last=last)


@max_pool_backward_op.register_fake
def _(
    grad: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
    last: bool,
) -> Tensor:
    return torch.empty(tuple(shape), dtype=grad.dtype, device=grad.device, memory_format=memory_format(last))


def _make_window(
    size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> Window:
    pairs = [(first, second) for first, second in (size, stride, padding, dilation)]
    return Window(pairs[0], pairs[1], pairs[2], pairs[3], ceil)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.window_arguments = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])
    ctx.shape, ctx.last = list(x.shape), is_channels_last(x)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
    if grad is None:
        return (None,) * 6
    (codes,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # `create_graph`
        of_input = _compute_differentiable_gradient(
            grad, codes, ctx.shape, _make_window(*ctx.window_arguments), ctx.last
        )
    else:
        of_input = max_pool_backward_op(grad, codes, ctx.shape, *ctx.window_arguments, ctx.last)
    return of_input, None, None, None, None, None


max_pool_op.register_autograd(_backward, setup_context=_setup)
