"""Compares the current value of a place with the value that the trace has read."""

from __future__ import annotations

import struct
from types import MethodType, NoneType
from typing import Any, Final

import torch


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING: Final = _Missing()
SCALARS = (bool, int, float, complex, str, bytes, NoneType)
# Objects of these types have no mutable parts.
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
ATOMS = (*SCALARS, *_OF_TORCH, range, slice, type(...), type(NotImplemented))


_IMMUTABLE = 1 << 8
_HEAP = 1 << 9


def is_python_class(cls: type) -> bool:
    """True if Python code created the class, so that its attributes can be set."""
    return bool(cls.__flags__ & _HEAP) and not cls.__flags__ & _IMMUTABLE


def is_atom(value: object) -> bool:
    """True if a value has no mutable parts. A number of a user's subclass has attributes, so it does not count."""
    return isinstance(value, ATOMS) and not is_python_class(type(value))


def same(current: Any, before: Any) -> bool:
    """True for identical objects, and for two objects of equal types and equal bits.

    In Python, 1, 1.0 and True are equal, and so are 0.0 and -0.0. A trace distinguishes these values.
    """
    if current is before:
        return True
    if type(current) is not type(before) or (isinstance(current, ATOMS) and is_python_class(type(current))):
        return False
    if isinstance(current, float):
        return struct.pack("d", current) == struct.pack("d", before)
    if isinstance(current, complex):
        return struct.pack("dd", current.real, current.imag) == struct.pack("dd", before.real, before.imag)
    if isinstance(current, ATOMS):
        return bool(current == before)
    if isinstance(current, tuple):
        return len(current) == len(before) and all(map(same, current, before))
    if isinstance(current, MethodType):
        return current.__func__ is before.__func__ and current.__self__ is before.__self__
    if is_numpy(current, "generic"):
        return bool(current.dtype == before.dtype and current.tobytes() == before.tobytes())
    return False


def is_numpy(value: object, kind: str) -> bool:
    """True if `value` is an instance of numpy's class `kind`. The function does not import numpy."""
    return any(c.__module__ == "numpy" and c.__name__ == kind for c in type(value).__mro__)
