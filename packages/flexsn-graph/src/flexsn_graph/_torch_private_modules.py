"""Parts of torch that are private: the registries and hooks of `nn.Module`, and defaults of tensor factories."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _device

from flexsn_graph.versions import lacking, private

_WITHOUT = "reads of step functions are recorded incompletely: a changed value may not be detected"

# The dictionaries of a module that `__getattr__` searches, in this order.
REGISTRIES = ("_parameters", "_buffers", "_modules")
MODULE_DEFINED_IN = nn.Module.__module__
# The code that runs when a module is called.
MODULE_CALL: CodeType | None = getattr(
    private("torch.nn", "Module._call_impl", _WITHOUT, default=None), "__code__", None
)
# `torch.get_default_device()` takes a few microseconds. Reading torch's variable `CURRENT_DEVICE` is faster.
_HAS_CURRENT_DEVICE = not lacking("torch.utils._device", ["CURRENT_DEVICE"])

# Settings that tensor factories read, by name.
DEFAULTS: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": (
        partial(getattr, _device, "CURRENT_DEVICE") if _HAS_CURRENT_DEVICE else torch.get_default_device
    ),
}


def without_fx_wrapper(entry: Any) -> Any:
    """An attribute of a class, without the wrapper that torch.fx adds to methods of `nn.Module` during a trace."""
    while isinstance(entry, FunctionType) and entry.__globals__.get("__name__", "").startswith("torch.fx."):
        wrapped = getattr(entry, "__wrapped__", None)
        if wrapped is None:
            break
        entry = wrapped
    return entry


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """The dictionaries of global hooks, by name.

    Global hooks run in addition to a module's own hooks, when the module is called, or when it registers a parameter, a
    buffer or another module.
    """
    variables = vars(torch.nn.modules.module).items()
    return {name: value for name, value in variables if name.startswith("_global_") and isinstance(value, dict)}
