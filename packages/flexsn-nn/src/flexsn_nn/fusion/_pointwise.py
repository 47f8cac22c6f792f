"""Which nodes of a graph of Dynamo's are elementwise functions that a neuron's step can compute."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Hashable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

from flexsn_nn._dynamo_graphs import example

_OF_TORCH = str(Path(torch.__file__).parent)
_UNARY = ("neg", "abs", "relu", "sigmoid", "tanh", "exp", "square", "sqrt")
_BINARY = ("add", "sub", "mul", "div", "true_divide", "maximum", "minimum")
_OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg)
_FUNCTIONS = frozenset(
    [
        *_OPERATORS,
        *(getattr(torch, name) for name in (*_UNARY, *_BINARY, "clamp", "where")),
        *(getattr(nn.functional, name) for name in ("relu", "hardtanh", "leaky_relu", "softplus", "silu")),
    ]
)
_METHODS = frozenset([*_UNARY, *_BINARY, "clamp", "to", "float", "double", "half", "bfloat16"])
# What writes to nothing but its arguments, and to those in a way that shows in their versions.
_MODULES: tuple[ModuleType, ...] = (torch, nn.functional, operator, math)
_KNOWN: frozenset[Any] = frozenset(
    [value for module in _MODULES for value in vars(module).values() if callable(value) and isinstance(value, Hashable)]
)
# Of a tensor's sizes, dtype and device, not of its values.
_OF_ITS_FORM = frozenset(["new_zeros", "new_ones", "new_empty", "new_full", "size", "dim"])


def is_pointwise(node: fx.Node) -> bool:
    """True if each element of the result is a function of one element of each operand, also on a kernel."""
    if node.op == "call_function":
        known = node.target in _FUNCTIONS
    else:
        known = node.op == "call_method" and node.target in _METHODS
    return known and all(_is_plain(value) for value in (*node.args, *node.kwargs.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return example(value) is not None
    return value is None or isinstance(value, bool | int | float | torch.dtype)


def is_of_form(node: fx.Node) -> bool:
    """True if a node reads no values of its first argument."""
    return node.op == "call_method" and node.target in _OF_ITS_FORM


def separates(node: fx.Node) -> bool:
    """True if what is computed before a node may be something else after it.

    Modes change there (autocast, `no_grad`, hooks), or memory is written to without a trace in `is_written`. What
    methods and PyTorch's own functions write shows in a tensor's version; what functions of lists, a user's own
    operators and other transforms write may not.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    name = getattr(node.target, "__name__", "")
    return "example_value" not in node.meta or name.endswith("_") or node.target not in _KNOWN


def forgets_versions(node: fx.Node) -> bool:
    """True if a node is `tensor.data`: what writes to it leaves the tensor's version as it is."""
    return getattr(node.target, "__name__", "") == "_get_data_attr"


def described(node: fx.Node) -> str:
    """Describes a node in words, with the user's line that it comes from."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    frames = re.findall(r'File "([^"]*)", line (\d+)', node.stack_trace or "")
    # Below the user's line may be lines of active modes, as of a default device.
    lines = [f"{file}:{line}" for file, line in frames if not file.startswith(_OF_TORCH)]
    return f"{name} ({lines[-1]})" if lines else str(name)
