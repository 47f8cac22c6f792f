"""Launches the kernels of `flexsn_codegen.targets.triton.device._delays`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import run_kernel

_STEPS = 8  # steps per program; their loads are in flight together
_BLOCK = 128
_INTERPRETED_BLOCK = 1024
_HALF = {torch.float16: 1, torch.bfloat16: 2}
_OF_FILTER = 4


def between(x: Tensor, past: Tensor | None, whole: Tensor, fraction: Tensor | None, inner: int, most: int) -> Tensor:
    """Returns the values of `x` from `whole + fraction` steps before each step, interpolated linearly.

    Args:
        x: `[T, *step]`.
        past: `[most, *step]`, the values before the first step; `None` for zeros.
        whole, fraction: `[size]` each. `whole` is int32. `fraction` has the dtype of `x`, or is `None` if all delays
            are whole steps.
        inner: number of neighbouring elements that share a delay.
        most: the largest number of whole steps in a delay.
    """
    y = torch.empty_like(x)
    block, grid = _choose_grid(x)
    tensors = (x, x if past is None else past, whole, x if fraction is None else fraction, y)
    constants = (most, past is not None, fraction is not None, _HALF.get(x.dtype, 0), _STEPS, block)
    run_kernel(
        _import_kernels().between_kernel,
        (grid, -(-len(x) // _STEPS)),
        tensors,
        _list_sizes(x, inner, whole),
        constants,
        _choose_warps(),
        fused=False,
    )
    return y


def between_gradient(
    grad: Tensor,
    x: Tensor | None,
    past: Tensor | None,
    whole: Tensor,
    fraction: Tensor | None,
    inner: int,
    most: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of `x`, `past` and the fraction.

    The gradient of the fraction has one value per element of a step.

    Args:
        x: `None` if the gradient of the fraction is not needed.
    """
    grad_x = torch.empty_like(grad)
    grad_past = None if past is None else torch.empty_like(past)
    total = None if x is None else _allocate_step(grad)
    block, grid = _choose_grid(grad)
    tensors = (grad, x, past, whole, fraction, grad_x, grad_past, total)
    constants = (most, past is not None, fraction is not None, x is not None, _STEPS, block)
    numbers = _list_sizes(grad, inner, whole)
    run_kernel(
        _import_kernels().between_gradient_kernel,
        (grid,),
        _replace_none(tensors, grad),
        numbers,
        constants,
        _choose_warps(),
    )
    return grad_x, grad_past, total


def filtered(x: Tensor, past: Tensor | None, taps: Tensor, inner: int) -> Tensor:
    """Computes `y[t] = sum over l of taps[l] x[t - l]`.

    Args:
        x, past, inner: same as for `between`.
        taps: `[most + 1, size]`.
    """
    y = torch.empty_like(x)
    block, grid = _choose_grid(x)
    tensors = (x, x if past is None else past, taps, y)
    constants = (len(taps) - 1, past is not None, block)
    size = (grid, -(-len(x) // _OF_FILTER))
    run_kernel(
        _import_kernels().filter_kernel, size, tensors, _list_sizes(x, inner, taps[0]), constants, _choose_warps()
    )
    return y


def filter_gradient(
    grad: Tensor, x: Tensor | None, past: Tensor | None, taps: Tensor, slopes: Tensor, inner: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of `x`, `past` and the delays.

    The gradient of the delays has one value per element of a step.

    Args:
        x: `None` if the gradient of the delays is not needed.
        slopes: `[most + 1, size]`, derivatives of the taps.
    """
    grad_x = torch.empty_like(grad)
    grad_past = None if past is None else torch.empty_like(past)
    total = None if x is None else _allocate_step(grad)
    block, grid = _choose_grid(grad)
    tensors = (grad, x, past, taps, slopes, grad_x, grad_past, total)
    constants = (len(taps) - 1, past is not None, x is not None, block)
    numbers = _list_sizes(grad, inner, taps[0])
    run_kernel(
        _import_kernels().filter_gradient_kernel,
        (grid,),
        _replace_none(tensors, grad),
        numbers,
        constants,
        _choose_warps(),
    )
    return grad_x, grad_past, total


def _allocate_step(grad: Tensor) -> Tensor:
    return torch.empty(grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device)


def _replace_none(tensors: tuple[Tensor | None, ...], replacement: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors, with `replacement` in place of each `None`. Kernels do not read these replacements."""
    return tuple([replacement if tensor is None else tensor for tensor in tensors])


def _list_sizes(x: Tensor, inner: int, delays: Tensor) -> tuple[int, ...]:
    return len(x), x[0].numel(), inner, delays.numel()


def _choose_grid(x: Tensor) -> tuple[int, int]:
    block = _INTERPRETED_BLOCK if triton_interpreted() else _BLOCK
    return block, -(-x[0].numel() // block)


def _choose_warps() -> int:
    return 4


@functools.cache
def _import_kernels() -> Any:
    """Returns the module of kernels. Its import also imports Triton."""
    from flexsn_codegen.targets.triton.device import _delays

    return _delays
