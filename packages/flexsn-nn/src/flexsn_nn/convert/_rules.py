"""Conversion rules for modules of SpikingJelly and snnTorch, and reasons why a module cannot be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flexsn_nn.convert._report import Moved


class Unconvertible(Exception):
    """Raised for a module that cannot be converted; the message is the reason."""


@dataclass(frozen=True)
class Replacement:
    """A module that replaces a module of another library.

    Attributes:
        module: the new module.
        moved: new keys and shapes of parameters and buffers, by their names in the old module.
        dropped: parameters and buffers of the old module that the new module lacks. Maps their names to reasons.
        differences: same as in `Converted`.
    """

    module: nn.Module
    moved: Mapping[str, Moved] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()


def _reject_container(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    raise AssertionError("the modules of this rule are not containers")


@dataclass(frozen=True)
class Rule:
    """Conversion of the modules of one class.

    Attributes:
        make: function `(module, backend) -> Replacement`, which raises `Unconvertible` if the module cannot be
            converted.
        container: True if the module only holds an ordered list of children. `make_container(module, children)` then
            returns the new module with the converted children.
        descend: True to also visit the children of a module that is not replaced.
    """

    make: Callable[[Any, str], Replacement]
    make_container: Callable[[Any, Mapping[str, nn.Module]], nn.Module] = _reject_container
    container: bool = False
    descend: bool = False


def leave_unchanged(reason: str, *, descend: bool = False) -> Rule:
    """Returns the rule for a module that is not converted."""

    def make(module: nn.Module, backend: str) -> Replacement:
        raise Unconvertible(reason)

    return Rule(make, descend=descend)


def library(kind: type) -> str:
    """Returns the package of a class: `"torch"`, `"snntorch"`, ..."""
    return kind.__module__.partition(".")[0]


def is_derived_from(module: nn.Module, package: str, name: str) -> bool:
    """True if the module's class has a base class of this name in this package."""
    return any(library(kind) == package and kind.__name__ == name for kind in type(module).__mro__)


def explain_own_class(module: nn.Module, package: str) -> str:
    """Returns the reason why a user's subclass of a library's class is not converted."""
    base = next(kind for kind in type(module).__mro__ if library(kind) == package)
    return (
        f"it is your own class, derived from {base.__name__}, with unknown methods. Write its time step as a "
        "function, FlexSN(core, ...), or derive the class from a neuron of flexsn_nn.neuron."
    )
