"""Replaces modules throughout a network."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from flexsn_nn._backends import check_backend
from flexsn_nn._numbers import give_a_dimension
from flexsn_nn.convert import _snntorch, _spikingjelly
from flexsn_nn.convert._report import Conversion, Converted, Left, Moved
from flexsn_nn.convert._rules import Replacement, Rule, Unconvertible, library
from flexsn_nn.errors import ConversionError

LIBRARIES = (_spikingjelly, _snntorch)


def convert(model: nn.Module, *, backend: str = "auto", strict: bool = False) -> Conversion:
    """Replaces the neurons of SpikingJelly and snnTorch by neurons of this package, in place.

    The network is called as before, and its outputs are equal, up to the differences that the report names. Learned
    parameters remain the same objects, so an optimizer still updates them. The only exceptions are parameters that the
    report describes as new objects. A learned parameter without dimensions gets the shape `[1]`, because `fully_shard`
    rejects parameters without dimensions. An optimizer that has already taken a step with such a parameter has to be
    created again. States are not copied: neurons begin with their initial states. Each module keeps its step mode, so a
    network with a loop over time keeps its loop.

    Args:
        model: a network or a single neuron. Modules of other kinds do not change.
        backend: backend of the neurons, same as in `FlexSN`.
        strict: True to raise an error, and to leave the network unchanged, if a module cannot be converted.

    Returns:
        The network and the report. The report can also load checkpoints of the original network.

    Raises:
        ConversionError: with `strict`, a module cannot be converted.
        UnknownNameError: the backend is unknown.
    """
    check_backend(backend, "m")
    visitor = _Visitor(backend)
    changed = visitor.visit("", model)
    report = Conversion(changed.module, visitor.converted, visitor.left, dict(changed.moved), dict(changed.dropped))
    if strict and visitor.left:
        raise ConversionError(f"some modules cannot be converted, so nothing was changed.\n{report}")
    for number in visitor.numbers:
        give_a_dimension(number)
    for parent, child, module in visitor.places:
        parent.add_module(child, module)
    for lib in LIBRARIES:
        lib.forget(model)
    return report


class _Place(NamedTuple):
    """A new module, and the parent module and name under which it replaces the old module."""

    parent: nn.Module
    child: str
    module: nn.Module


class _Visitor:
    """Visits each module once, and collects changes without applying them.

    The rule of a module decides whether the children of the module are visited, too.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.converted: list[Converted] = []
        self.left: list[Left] = []
        self.places: list[_Place] = []
        self.numbers: list[nn.Parameter] = []
        self._replacements: dict[int, Replacement] = {}

    def visit(self, name: str, module: nn.Module) -> Replacement:
        """Returns the replacement of a module, which may be the module itself."""
        if id(module) not in self._replacements:
            self._replacements[id(module)] = self._replace(name, module)
        return self._replacements[id(module)]

    def _replace(self, name: str, module: nn.Module) -> Replacement:
        label = name or type(module).__name__
        kind = f"{library(type(module))} {type(module).__name__}"
        rule = next(
            (candidate for candidate in (lib.rule_of(module) for lib in LIBRARIES) if candidate is not None), None
        )
        try:
            if rule is not None and not rule.container:
                replacement = self._plan_dimensions(rule.make(module, self.backend))
                replacement.module.train(module.training)
                self._record_conversion(label, kind, replacement, module)
                return replacement
        except Unconvertible as reason:
            self.left.append(Left(label, kind, str(reason)))
            if rule is not None and not rule.container and not rule.descend:
                return Replacement(module)
        return self._visit_children(name, module, rule, kind)

    def _visit_children(self, name: str, module: nn.Module, rule: Rule | None, kind: str) -> Replacement:
        """Visits the children of a module. The replacement contains the module itself, or a new container."""
        moved: dict[str, Moved] = {}
        dropped: dict[str, str] = {}
        children: dict[str, nn.Module] = {}
        for child, child_module in module._modules.items():
            if child_module is None:
                continue
            replacement = self.visit(f"{name}.{child}" if name else child, child_module)
            children[child] = replacement.module
            for key, place in replacement.moved.items():
                moved[f"{child}.{key}"] = Moved(f"{child}.{place.key}", place.shape)
            dropped.update({f"{child}.{key}": reason for key, reason in replacement.dropped.items()})
        if rule is not None and rule.container:
            container = rule.make_container(module, children)
            container.train(module.training)
            result = Replacement(container, moved, dropped)
            self._record_conversion(name or type(module).__name__, kind, result, module)
            return result
        self.places += [
            _Place(module, child, new) for child, new in children.items() if new is not module._modules[child]
        ]
        return Replacement(module, moved, dropped)

    def _plan_dimensions(self, replacement: Replacement) -> Replacement:
        """Plans the shape `[1]` for learned parameters without dimensions. `convert` reshapes them after all visits."""
        numbers = {name: value for name, value in replacement.module.named_parameters() if value.dim() == 0}
        self.numbers += numbers.values()
        moved = {
            name_in_old: replace(place, shape=(1,)) if place.key in numbers else place
            for name_in_old, place in replacement.moved.items()
        }
        return replace(replacement, moved=moved)

    def _record_conversion(self, name: str, kind: str, replacement: Replacement, old: nn.Module) -> None:
        num_hooks = len(old._forward_hooks) + len(old._forward_pre_hooks) + len(old._backward_hooks)
        num_kept = len(replacement.module._forward_hooks) + len(replacement.module._forward_pre_hooks)
        differences = replacement.differences
        if num_hooks > num_kept:
            differences += (f"{num_hooks} hooks stayed with the old module: register them again.",)
        self.converted.append(Converted(name, kind, type(replacement.module).__name__, differences))
