"""Checks of the arguments that users pass to constructors: ranges and names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from flexsn_nn.errors import InputShapeError, ParameterError, UnknownNameError
from flexsn_runtime import DeviceError


class Range(TypedDict, total=False):
    """Bounds of a number, and a hint for the error message.

    `hint` is a sentence with advice about numbers that are out of range. `finite` is True if the formulas that use the
    number have finite derivatives even close to `above`. By default, these formulas are assumed to have a pole at
    `above`.
    """

    at_least: float
    above: float
    at_most: float
    below: float
    hint: str
    finite: bool


def check_number(name: str, value: float | Tensor, **limits: Unpack[Range]) -> None:
    """Raises `ParameterError` unless `value`, or each of its elements, is finite and within the range.

    Args:
        name: the parameter's name.
        value: a number, or a floating-point tensor. A tensor without data is not checked.
        limits: bounds of the range.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise ParameterError(f"{name} is a tensor of {value.dtype}; give a floating-point tensor.")
        if value.is_meta or value.numel() == 0:
            return
        low, high = (float(bound) for bound in torch.aminmax(value.detach()))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low = high = float(value)
    else:
        raise ParameterError(f"{name} is {value!r}, a {type(value).__name__}; give a number or a tensor.")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ParameterError(f"{name} is not finite: {value}.")
    at_least, above = limits.get("at_least", -math.inf), limits.get("above", -math.inf)
    at_most, below = limits.get("at_most", math.inf), limits.get("below", math.inf)
    bounds = [
        (low >= at_least, f"at least {at_least:g}"),
        (low > above, f"above {above:g}"),
        (high <= at_most, f"at most {at_most:g}"),
        (high < below, f"below {below:g}"),
    ]
    for is_inside, bound in bounds:
        if not is_inside:
            span = f"{low:g}" if low == high else f"from {low:g} to {high:g}"
            raise ParameterError(f"{name} is {span}; it must be {bound}. {limits.get('hint', '')}".rstrip())


def check_function(name: str, function: object, example: str = "surrogate.Sigmoid()") -> None:
    """Raises `ParameterError` unless `function` is callable. A class is also rejected: an instance is needed."""
    if isinstance(function, type):
        raise ParameterError(f"{name} is the class {function.__name__}; give an instance: {function.__name__}().")
    if not callable(function):
        raise ParameterError(
            f"{name} is {function!r}, a {type(function).__name__}; give a function of tensors, such as {example}."
        )


def check_module(name: str, module: object) -> None:
    """Raises `TypeError` unless `module` is an `nn.Module`. The message has advice about classes and lists."""
    if isinstance(module, nn.Module):
        return
    if isinstance(module, type):
        raise TypeError(f"{name} is the class {module.__name__}; give an instance: {module.__name__}(...).")
    remedy = ": nn.ModuleList(...) combines several modules" if isinstance(module, list | tuple) else ""
    raise TypeError(f"{name} is a {type(module).__name__}; give an nn.Module{remedy}.")


def check_tensor(name: str, value: object, *, dims: int = 0) -> None:
    """Raises an error unless `value` is a tensor.

    Args:
        name: the argument's name, for the message.
        dims: minimum number of dimensions.

    Raises:
        TypeError: `value` is not a tensor.
        InputShapeError: `value` has fewer than `dims` dimensions.
    """
    if not isinstance(value, Tensor):
        remedy = ": torch.stack(...) combines several tensors" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{name} is a {type(value).__name__}; give a tensor{remedy}.")
    if value.dim() < dims:
        raise InputShapeError(f"{name} has shape {list(value.shape)}; it needs at least {dims} dimension(s).")


def check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raises `DeviceError` if a module's tensor and an input are on different devices."""
    if are_apart(tensor, x.device):
        raise DeviceError(
            f"{name} is on {tensor.device} and the input on {x.device}: move the module, net.to({str(x.device)!r}), or "
            "the input."
        )


def are_apart(tensor: Tensor, device: torch.device) -> bool:
    """True if `tensor` is not on `device`. False for a scalar on the CPU, which operations on every device accept."""
    return tensor.device != device and (tensor.dim() > 0 or tensor.device.type != "cpu")


def check_count(name: str, value: int, *, at_least: int = 1) -> None:
    """Raises `ParameterError` unless `value` is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ParameterError(f"{name} is {value!r}; it must be a whole number of at least {at_least}.")


def check_name(kind: str, name: str, known_names: Iterable[str]) -> None:
    """Raises `UnknownNameError` unless `name` is known. The message suggests the nearest known name."""
    names = list(known_names)
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"unknown {kind} {name!r}; known: {', '.join(map(repr, names))}.{hint}")
