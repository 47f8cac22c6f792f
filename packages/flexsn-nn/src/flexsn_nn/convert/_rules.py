"""Rules of the two libraries' files for a module, and reasons that may keep it from being converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flexsn_nn.convert._report import Moved


class Unconvertible(Exception):
    """A module that stays as it is; the message is the reason."""


@dataclass(frozen=True)
class Replacement:
    """A module that replaces another.

    Attributes:
        module: the new one.
        moved: parameters and buffers that have another place than before, by their names in the old module.
        dropped: those that the new module lacks, and why.
        differences: as in `Converted`.
    """

    module: nn.Module
    moved: Mapping[str, Moved] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()


def _no_container(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    raise AssertionError("this rule makes no container")


@dataclass(frozen=True)
class Rule:
    """How a module of a library is converted.

    Attributes:
        make: `(module, backend) -> Replacement`; raises `Unconvertible`.
        container: whether the module is only its children in an order; then `make_container(module, children)` makes
            the new one of the converted children.
        descend: whether to look into a module that stays as it is.
    """

    make: Callable[[Any, str], Replacement]
    make_container: Callable[[Any, Mapping[str, nn.Module]], nn.Module] = _no_container
    container: bool = False
    descend: bool = False


def stays(reason: str, *, descend: bool = False) -> Rule:
    """The rule of a module that is not converted."""

    def make(module: nn.Module, backend: str) -> Replacement:
        raise Unconvertible(reason)

    return Rule(make, descend=descend)


def library(kind: type) -> str:
    """The package that a class comes from: `"torch"`, `"snntorch"`, ..."""
    return kind.__module__.partition(".")[0]


def derived_from(module: nn.Module, package: str, name: str) -> bool:
    """True if a class of this name and package is among the module's bases."""
    return any(library(kind) == package and kind.__name__ == name for kind in type(module).__mro__)


def of_ones_own(module: nn.Module, package: str) -> str:
    """The reason why a class that is derived from a library's stays."""
    base = next(kind for kind in type(module).__mro__ if library(kind) == package)
    return (
        f"a class of one's own, derived from {base.__name__}: what it overrides is not known. Write its time step as a "
        "function, FlexSN(core, ...), or derive from a flexsn_nn.neuron."
    )
