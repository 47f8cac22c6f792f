"""Parts of a library that are read once: its functions, and the objects that it keeps for itself."""

from __future__ import annotations

import sys
from types import FunctionType

_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "numpy", "triton"),
        # What torch needs, and calls while it traces.
        *("filelock", "fsspec", "functorch", "jinja2", "mpmath", "networkx", "sympy", "typing_extensions"),
        *("flexsn_graph", "flexsn_codegen", "flexsn_hop", "flexsn_runtime", "flexsn_nn"),
    }
)
# Classes of libraries whose objects hold what a user puts into them.
_HOLDERS = (
    *("collections", "argparse", "types", "dataclasses", "weakref", "_weakrefset", "configparser", "queue"),
    *("multiprocessing.sharedctypes", "torch.nn", "torch.optim", "flexsn_nn", "flexsn_runtime"),
)


def is_library(module: object) -> bool:
    """True if a module of this name is the standard library's, torch's, numpy's, triton's or this project's."""
    if not isinstance(module, str):
        return False
    # What a named tuple is made by has a module of its own.
    return module.partition(".")[0] in _LIBRARIES or module.startswith("namedtuple_")


def is_library_function(function: FunctionType) -> bool:
    """By where its code is: a wrapper that a library made of a user's function has that function's name."""
    return is_library(function.__globals__.get("__name__"))


def is_library_class(cls: type) -> bool:
    """True if a library defines the class."""
    return is_library(cls.__module__)


def keeps_to_itself(cls: type) -> bool:
    """True if objects of this class are a library's business: a logger, a lock, a context manager."""
    module = cls.__module__
    if not is_library(module):
        return False
    return not any(module == holder or module.startswith(f"{holder}.") for holder in _HOLDERS)
