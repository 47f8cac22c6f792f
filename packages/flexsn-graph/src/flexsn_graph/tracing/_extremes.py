"""Expresses extremes, their positions and one-hot codes by ops that kernels have. Results and gradients match torch.

The position of an extreme is the index of the first element that equals the extreme or is NaN. The gradient of the
extreme flows to this element only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


def _position(x: Tensor, dim: int, extreme: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The indices of the elements along `dim`, and the index of the extreme of each row. Both results are float32."""
    fixed, size = x.detach(), x.shape[dim]
    shape = [1] * x.dim()
    shape[dim] = size
    numbers = torch.arange(size, dtype=torch.float32, device=x.device).view(shape)
    is_extreme = (fixed == extreme(fixed, dim, keepdim=True)) | (fixed != fixed)
    return numbers, torch.amin(torch.where(is_extreme, numbers, float(size)), dim, keepdim=True)


def _with_position(extreme: Callable[..., Tensor], result: Any, x: Tensor, dim: int, keepdim: bool = False) -> Any:
    numbers, position = _position(x, dim, extreme)
    value = torch.where(numbers == position, x, 0.0).sum(dim, keepdim=keepdim)
    return result((value, (position if keepdim else position.squeeze(dim)).long()))


def _max(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    return _with_position(torch.amax, torch.return_types.max, x, dim, keepdim)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    return _with_position(torch.amin, torch.return_types.min, x, dim, keepdim)


def _argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    position = _position(x, dim, torch.amax)[1]
    return (position if keepdim else position.squeeze(dim)).long()


def _argmin(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    position = _position(x, dim, torch.amin)[1]
    return (position if keepdim else position.squeeze(dim)).long()


def _one_hot(position: Tensor, num_classes: int) -> Tensor:
    return (position.unsqueeze(-1) == torch.arange(num_classes, device=position.device)).long()


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.max: _max,
    Tensor.max: _max,
    torch.min: _min,
    Tensor.min: _min,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    torch.argmin: _argmin,
    Tensor.argmin: _argmin,
    functional.one_hot: _one_hot,
    # Ops of graphs that a compiler has captured.
    _aten.max.dim: _max,
    _aten.min.dim: _min,
    _aten.argmax.default: _argmax,
    _aten.argmin.default: _argmin,
    _aten.one_hot.default: _one_hot,
}


def as_reductions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """A function that computes the result of a call to `func` by ops that kernels have.

    `None` if there is no such function, or if it does not support the call's arguments.
    """
    entry = _FUNCTIONS.get(func)
    if entry is None or not args or not isinstance(args[0], Tensor) or len(args) + len(kwargs) < 2:
        return None
    if not set(kwargs) <= {"dim", "keepdim", "num_classes"}:
        return None
    number = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("num_classes"))
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    x = args[0]
    if entry is _one_hot:
        return entry if number > 0 else None
    return entry if x.is_floating_point() and -x.dim() <= number < x.dim() else None
