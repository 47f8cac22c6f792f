"""Finds elementwise functions in a Dynamo graph that a neuron's step can compute."""

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

_TORCH_FOLDER = str(Path(torch.__file__).parent)
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
# Modules whose functions write only to their arguments, and increase the version of a tensor to which they write.
_MODULES: tuple[ModuleType, ...] = (torch, nn.functional, operator, math)
_VERSIONED_FUNCTIONS: frozenset[Any] = frozenset(
    [value for module in _MODULES for value in vars(module).values() if callable(value) and isinstance(value, Hashable)]
)
# Methods that read only sizes, dtype and device of a tensor: its form.
_FORM_METHODS = frozenset(["new_zeros", "new_ones", "new_empty", "new_full", "size", "dim"])


def is_pointwise(node: fx.Node) -> bool:
    """True if kernels can compute the node, and each element of its result depends on one element of each operand."""
    if node.op == "call_function":
        is_elementwise = node.target in _FUNCTIONS
    else:
        is_elementwise = node.op == "call_method" and node.target in _METHODS
    return is_elementwise and all(_is_plain(value) for value in (*node.args, *node.kwargs.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return example(value) is not None
    return value is None or isinstance(value, bool | int | float | torch.dtype)


def reads_form(node: fx.Node) -> bool:
    """True if a node reads only sizes, dtype and device of its first argument, and not the argument's values."""
    return node.op == "call_method" and node.target in _FORM_METHODS


def separates(node: fx.Node) -> bool:
    """True if a value computed before this node could differ from the value computed after it.

    Such a node changes a mode (autocast, `no_grad`, hooks), or may write to memory in a way that `is_written` cannot
    detect. Methods and PyTorch's own functions increase a tensor's version when they write. Functions of lists, a
    user's own operators and functions of other modules might not increase the version.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    name = getattr(node.target, "__name__", "")
    return "example_value" not in node.meta or name.endswith("_") or node.target not in _VERSIONED_FUNCTIONS


def forgets_versions(node: fx.Node) -> bool:
    """True if a node is `tensor.data`. Writing to `tensor.data` does not increase the tensor's version."""
    return getattr(node.target, "__name__", "") == "_get_data_attr"


def describe(node: fx.Node) -> str:
    """Describes a node by its function, and by the line of the user's code that calls the function."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    frames = re.findall(r'File "([^"]*)", line (\d+)', node.stack_trace or "")
    # After the user's line, the stack may contain lines of active modes, such as a default device.
    lines = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH_FOLDER)]
    return f"{name} ({lines[-1]})" if lines else str(name)
