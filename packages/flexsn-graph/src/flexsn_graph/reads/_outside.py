"""Recognizes library functions that depend on more than their arguments, such as on a clock, a setting or a file.

Calls of such functions from user code are detected during the trace of a core. If a function can be called again
without side effects, its result is compared at each call of the core. Random generators are refused. All other such
functions are called only in the trace, and their names are reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

# Functions that have neither arguments nor side effects. Their results are compared at each call of the core.
_REPEATABLE: tuple[Callable[[], Any], ...] = (
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_deterministic_debug_mode,
    torch.get_num_threads,
    torch.get_num_interop_threads,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.initial_seed,
    torch.random.initial_seed,
    os.getcwd,
)
_REPEATABLE_BUILTINS = {id(f): f for f in _REPEATABLE if not isinstance(f, FunctionType)}
_REPEATABLE_FUNCTIONS: dict[CodeType, Callable[[], Any]] = {
    f.__code__: f for f in _REPEATABLE if isinstance(f, FunctionType)
}
# Functions that read settings. These settings are always compared, because each trace is valid for their values only.
_COMPARED = frozenset({"get_default_dtype", "get_default_device", "get_autocast_dtype", "is_autocast_enabled"})

_RANDOM = frozenset({"random", "secrets"})
# Modules whose functions depend on their arguments alone. Functions that only have side effects, such as warnings, also
# count.
_PURE_MODULE_NAMES = """
    _abc _bisect _collections _collections_abc _contextvars _functools _heapq _operator _pickle _py_abc _sre _struct
    _thread _weakref _weakrefset abc array ast bisect cmath codecs collections colorsys configparser contextlib
    contextvars copy copyreg dataclasses decimal enum fractions functools heapq importlib itertools json keyword
    marshal math numbers operator pickle pprint queue re reprlib statistics string struct textwrap token tokenize
    traceback types typing typing_extensions unicodedata warnings weakref zlib
"""
_PURE_MODULES = frozenset(_PURE_MODULE_NAMES.split())
# In these modules, only the listed functions depend on more than their arguments.
_STATEFUL_BY_MODULE: dict[str, frozenset[str]] = {
    "builtins": frozenset({"id", "input"}),
    "datetime": frozenset({"now", "today", "utcnow"}),
    "io": frozenset({"open", "open_code"}),
    "_io": frozenset({"getbuffer", "getvalue", "read", "read1", "readinto", "readline", "readlines", "tell"}),
    "logging": frozenset({"getEffectiveLevel", "hasHandlers", "isEnabledFor"}),
    "threading": frozenset({"active_count", "current_thread", "enumerate", "get_ident", "get_native_id"}),
    "uuid": frozenset({"uuid1", "uuid4", "getnode"}),
    "os": frozenset({"cpu_count", "get_exec_path", "popen", "walk"}),
    "pathlib": frozenset(
        {"cwd", "exists", "glob", "home", "is_dir", "is_file", "iterdir", "open", "read_bytes", "read_text", "stat"}
    ),
    "posixpath": frozenset({"exists", "expanduser", "getmtime", "getsize", "isdir", "isfile", "realpath"}),
    "genericpath": frozenset({"exists", "getmtime", "getsize", "isdir", "isfile"}),
    "numpy": frozenset(
        {"fromfile", "genfromtxt", "get_printoptions", "getbufsize", "geterr", "geterrcall", "load", "loadtxt"}
    ),
}
_STATEFUL_PREFIXES = ("are_", "current_", "device_count", "get_", "initial_seed", "is_", "load", "memory_", "_get_")
# Functions that depend on their argument alone, or that return the same value in a trace as in a loop.
_STATELESS = frozenset({"is_storage", "is_tensor", "is_scripting", "is_tracing", "get_device_module", "is_tensor_like"})
_STATELESS_MODULES = ("torch.nn.", "torch.fx.", "torch.utils.", "torch.func.", "torch.distributions.", "torch.optim.")


def find_repeatable(function: Any) -> Callable[[], Any] | None:
    """The function itself if its result can be compared at each call, otherwise `None`.

    Args:
        function: a function, or the code of a function.
    """
    if isinstance(function, CodeType):
        return _REPEATABLE_FUNCTIONS.get(function)
    return _REPEATABLE_BUILTINS.get(id(function))


def is_random(module: str | None, owner: object = None) -> bool:
    """True if a function of this module or object belongs to a random generator."""
    if module is not None and (module in _RANDOM or module.startswith("numpy.random")):
        return True
    return any(
        kind.__module__ in ("_random", "random") or kind.__module__.startswith("numpy.random")
        for kind in type(owner).__mro__
    )


def depends_on_more(module: str | None, name: str) -> bool:
    """True if a library's function may return different results for equal arguments."""
    if not module:
        return False
    top = module.partition(".")[0]
    if top == "torch":
        if module.startswith(_STATELESS_MODULES) or name in _STATELESS:
            return False
        return name.startswith(_STATEFUL_PREFIXES) and name not in _COMPARED
    if top in _STATEFUL_BY_MODULE:
        return name.rpartition(".")[2] in _STATEFUL_BY_MODULE[top]
    if top in ("triton", "sympy", "mpmath") or top.startswith("flexsn_"):
        return False
    return top not in _PURE_MODULES


def origin(function: BuiltinFunctionType) -> tuple[str | None, str]:
    """The module and the name of a builtin function.

    The module is `None` for a method that depends only on the value of its object.
    """
    owner, name = function.__self__, function.__name__
    if isinstance(owner, ModuleType):
        return function.__module__ or owner.__name__, name
    if isinstance(owner, type):
        definer = next((cls for cls in owner.__mro__ if name in cls.__dict__), owner)
        return definer.__module__, name
    # The content of a file is not part of the file object.
    return ("_io", f"{type(owner).__name__}.{name}") if type(owner).__module__ == "_io" else (None, name)
