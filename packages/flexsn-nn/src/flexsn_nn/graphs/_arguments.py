"""Splits the arguments of a captured step into tensors and a form, and copies tensors to the memory of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_nn._torch_private import copy_all as _copy_all

_NUMBERS = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Arguments of a call, split into tensors and a form.

    Attributes:
        tensors: tensors, in the order of the arguments.
        form: structure of the arguments, in which a mark replaces each tensor.
        obstacle: reason why no graph can run with these arguments; `None` if a graph can.
    """

    tensors: tuple[Tensor, ...]
    form: Any
    obstacle: str | None

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> CallArguments:
        """Splits arguments, which may be tuples, lists and dicts of further arguments."""
        tensors: list[Tensor] = []
        others: list[object] = []
        form = _take_apart(arguments, tensors, others)
        reason = None
        if others:
            reason = (
                f"an argument is a {type(others[0]).__name__}; a graph takes tensors, numbers, and containers of both"
            )
        return cls(tuple(tensors), form, reason)

    def check(self, device: torch.device) -> str | None:
        """Returns the reason why no graph on this device can run with these arguments; `None` if a graph can."""
        if self.obstacle is not None:
            return self.obstacle
        for i, tensor in enumerate(self.tensors):
            if tensor.device != device:
                return f"tensor {i} of the arguments is on {tensor.device}, the network on {device}: move the tensor"
            if type(tensor) is not Tensor:
                return f"tensor {i} of the arguments is a {type(tensor).__name__}, whose memory a graph does not copy"
            if tensor.requires_grad:
                return f"tensor {i} of the arguments requires a gradient, which a captured step does not return"
        return None

    @property
    def key(self) -> Hashable:
        """Key of the arguments. One graph can run with all arguments that have this key."""
        return self.form, tuple((t.shape, t.stride(), t.dtype) for t in self.tensors)

    def like(self) -> tuple[Tensor, ...]:
        """Returns copies of the tensors. The copies of dense tensors have the same strides."""
        return tuple(copy_of(tensor) for tensor in self.tensors)

    def put_together(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Rebuilds the arguments with other tensors."""
        result: tuple[Any, ...] = put_together(self.form, iter(tensors))
        return result


class _ArgumentMark:
    """Mark that replaces a tensor in a form."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _ArgumentMark()


def take_apart(value: Any) -> tuple[list[Tensor], Any]:
    """Splits a result into its tensors and its form, which has a mark for each tensor."""
    tensors: list[Tensor] = []
    return tensors, _take_apart(value, tensors, [])


def _take_apart(value: Any, tensors: list[Tensor], others: list[object]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, tuple | list):
        return (
            type(value) is tuple,
            tuple(_take_apart(item, tensors, others) for item in value),
            _find_named_tuple_class(value),
        )
    if isinstance(value, dict):
        return dict, tuple((key, _take_apart(item, tensors, others)) for key, item in value.items())
    if not isinstance(value, _NUMBERS):
        others.append(value)
        return _Constant(value)
    return _Constant(value)


def _find_named_tuple_class(value: Any) -> type | None:
    """Returns the class of a named tuple; `None` for other values."""
    return type(value) if hasattr(value, "_fields") else None


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True count as different arguments.
        is_same_type = isinstance(other, _Constant) and type(self.value) is type(other.value)
        return is_same_type and bool(self.value == other.value)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def put_together(form: Any, tensors: Any) -> Any:
    """Rebuilds a value from its form (see `take_apart`), with the next tensors from an iterator."""
    if form is _TENSOR:
        return next(tensors)
    if isinstance(form, _Constant):
        return form.value
    if form[0] is dict:
        return {key: put_together(item, tensors) for key, item in form[1]}
    is_tuple, items, tuple_class = form
    values = [put_together(item, tensors) for item in items]
    if tuple_class is not None:
        return tuple_class(*values)
    return tuple(values) if is_tuple else values


def copy_of(tensor: Tensor) -> Tensor:
    """Copies a tensor. If the tensor is dense, the copy has the same strides."""
    with torch.no_grad():
        return torch.empty_like(tensor).copy_(tensor)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors in few launches."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target in few launches."""
    if targets:
        with torch.no_grad():
            _copy_all(list(targets), list(sources))
