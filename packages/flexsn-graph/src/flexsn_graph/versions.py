"""Looks up private names of torch and Triton, and warns at the import of FlexSN if a name is missing.

Only the files `_torch_private*` and `_triton_private*` look up private names. They use the functions of this module.
flexsn-graph and flexsn-hop each have a copy of this file, because neither depends on the other. A test checks that the
copies are equal. Other packages import the module from one of these two.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

TESTED = {
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "triton": ("3.6", "3.7", "3.8", "3.9"),
}
"""The versions with which all tests have passed. See `benchmarks/results/torch_versions.md`."""


class UnsupportedVersionWarning(UserWarning):
    """The installed torch or Triton lacks a name that a part of FlexSN needs."""


class UnsupportedVersionError(NotImplementedError):
    """A call needs a name that the installed torch or Triton lacks."""


@functools.cache
def installed(library: str) -> str:
    """The name and version of a library, such as `"torch 2.15.0"`."""
    version = torch.__version__ if library == "torch" else importlib.metadata.version(library)
    return f"{library} {version}"


def private(
    module: str,
    name: str,
    without: str,
    *,
    takes: Collection[str] = (),
    default: Any = inspect.Parameter.empty,
) -> Any:
    """Looks up one private name, ``module.name``. If this version lacks the name, warns and returns a stand-in.

    The warning is an `UnsupportedVersionWarning`. Calling the stand-in or reading its attributes raises an
    `UnsupportedVersionError` with the message of the warning.

    Args:
        module: name of a module. This function imports it.
        name: the name to look up. Attributes may follow (``"_autograd._get_sequence_nr"``).
        without: the consequence of a missing name, as a sentence: ``"step functions cannot be traced"``.
        takes: for a function, the parameters that callers pass by keyword.
        default: the value to return if the name is missing, instead of a stand-in.
    """
    try:
        return needed(module, name, without, takes=takes)
    except UnsupportedVersionError as error:
        message = str(error)
    _warn(message)
    return default if default is not inspect.Parameter.empty else _make_stand_in(name, message)


def needed(module: str, name: str, without: str, *, takes: Collection[str] = ()) -> Any:
    """Looks up a name like `private`, but raises an error if the name is missing.

    Call this function for modules that are slow to import: `expect` checks such a module when FlexSN is imported, and
    `needed` imports it when it is used.

    Raises:
        UnsupportedVersionError: this version lacks the name.
    """
    try:
        result: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(describe_missing(module, name, without)) from error
    if missing := [parameter for parameter in takes if not _takes(result, parameter)]:
        raise UnsupportedVersionError(describe_missing(module, f"{name}({', '.join(missing)}=...)", without))
    return result


def lacking(module: str, names: Iterable[str]) -> list[str]:
    """Lists the `names` that `module` does not define. The module is not imported, because an import may take seconds.

    A name may be followed by an attribute of the class or by a parameter of the function (``"CustomOpDef._init_fn"``).
    """
    loaded = sys.modules.get(module)
    text = _read_source(module)

    def is_defined(name: str) -> bool:
        name, _, attribute = name.partition(".")
        if loaded is not None and not hasattr(loaded, name):
            return False
        if loaded is not None and not attribute:
            return True
        return _defines(text, attribute or name)

    return [name for name in names if not is_defined(name)]


def expect(module: str, names: Iterable[str], without: str) -> None:
    """Warns about each of the `names` that `module` does not define. The names themselves are imported later."""
    for name in lacking(module, names):
        _warn(describe_missing(module, name, without))


def describe_missing(module: str, name: str, without: str) -> str:
    """The message about a missing name."""
    library = module.partition(".")[0]
    tested = TESTED[library]
    return f"{installed(library)} has no {module}.{name}: {without}. Tested are {tested[0]} to {tested[-1]}."


def warn_if_newer(library: str) -> None:
    """Warns once per process if a library is newer than the tested versions. FlexSN uses the library nevertheless."""
    tested = TESTED[library]
    name, version = installed(library).split()
    if _parse_version(version) > _parse_version(tested[-1]):
        message = f"FlexSN was tested with {name} {tested[0]} to {tested[-1]}; this is {version}."
        # Python shows a warning once per registry. All packages use the library's registry, so they warn only once.
        registry = sys.modules[library].__dict__.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, UserWarning, filename=library, lineno=1, module=library, registry=registry)


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C has no signature
        return True
    return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# Matches a class, a function, a variable, a parameter, an attribute, an imported name, or a name in quotes.
_DEFINITION = (
    r"""\s*(?:(?:class|def)\s+{0}\b|(?:self\.)?{0}\s*(?:[:=,]|$))|.*[(,]\s*{0}\s*[:=]"""
    r"""|.*\bimport [^#]*\b{0}\b|.*["']{0}["']"""
)


def _defines(text: str, name: str) -> bool:
    # Matches only the lines in which the name occurs, which is ten times as fast as a search of the whole text.
    definition = re.compile(_DEFINITION.format(re.escape(name)))
    at = text.find(name)
    while at >= 0:
        begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        if definition.match(text[begin : end if end >= 0 else None]):
            return True
        at = text.find(name, at + 1)
    return False


@functools.cache
def _read_source(module: str) -> str:
    package, *path = module.split(".")
    file = sys.modules[package].__file__
    assert file is not None
    folder = Path(file).parent.joinpath(*path)
    for source in (folder.with_suffix(".py"), folder / "__init__.py"):
        if source.is_file():
            return source.read_text(encoding="utf-8")
    return ""


def _warn(message: str) -> None:
    warnings.warn(message, UnsupportedVersionWarning, stacklevel=3)


def _make_stand_in(name: str, message: str) -> Any:
    class Missing(type):
        """Metaclass of a stand-in, which allows subclasses and `isinstance`. Creating an instance raises an error."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedVersionError(message)

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            raise UnsupportedVersionError(message)

    return Missing(name.rpartition(".")[2], (), {})
