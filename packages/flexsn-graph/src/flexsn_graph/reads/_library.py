"""Recognizes functions and internal objects of libraries, whose values do not have to be compared at each call."""

from __future__ import annotations

import sys
from types import FunctionType

_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "numpy", "triton"),
        # Dependencies of torch, whose code runs during a trace.
        *("filelock", "fsspec", "functorch", "jinja2", "mpmath", "networkx", "sympy", "typing_extensions"),
        *("flexsn_graph", "flexsn_codegen", "flexsn_hop", "flexsn_runtime", "flexsn_nn"),
    }
)
# Modules of library classes whose objects contain the user's values.
_HOLDERS = (
    *("collections", "argparse", "types", "dataclasses", "weakref", "_weakrefset", "configparser", "queue"),
    *("multiprocessing.sharedctypes", "torch.nn", "torch.optim", "flexsn_nn", "flexsn_runtime"),
)


def is_library(module: object) -> bool:
    """True if a module belongs to the standard library, torch or its dependencies, numpy, triton or this project.

    Args:
        module: the name of the module. The result is False for an object that is not a string.
    """
    if not isinstance(module, str):
        return False
    # The function that creates a named tuple has a module name that starts with `namedtuple_`.
    return module.partition(".")[0] in _LIBRARIES or module.startswith("namedtuple_")


def is_library_function(function: FunctionType) -> bool:
    """True if the function is defined in a library. A library's wrapper around a user's function also counts."""
    return is_library(function.__globals__.get("__name__"))


def is_library_class(cls: type) -> bool:
    """True if a library defines the class."""
    return is_library(cls.__module__)


def is_internal(cls: type) -> bool:
    """True if a library uses objects of this class internally, such as loggers, locks and context managers."""
    module = cls.__module__
    if not is_library(module):
        return False
    return not any(module == holder or module.startswith(f"{holder}.") for holder in _HOLDERS)
