"""Docstrings: examples print the stated results, and a neuron's docstring begins with its equation."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import flexsn_nn
from flexsn_nn import neuron

MODULES = sorted(info.name for info in pkgutil.walk_packages(flexsn_nn.__path__, prefix="flexsn_nn.") if not info.ispkg)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", MODULES)
def test_examples_print_their_results(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert results.failed == 0


def test_several_modules_have_examples() -> None:
    finder = doctest.DocTestFinder()
    with_examples = [
        name for name in MODULES if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]
    assert len(with_examples) >= 5


NEURONS = sorted(
    (kind for kind in vars(neuron).values() if isinstance(kind, type) and issubclass(kind, neuron.Neuron)),
    key=lambda kind: kind.__name__,
)
# Base classes of neurons. Their subclasses add the equations.
BASES = {neuron.Neuron, neuron.ImmediateReset, neuron.DelayedReset, neuron.Feedback}


@pytest.mark.parametrize("kind", [kind for kind in NEURONS if kind not in BASES], ids=lambda kind: kind.__name__)
def test_a_neurons_docstring_begins_with_its_equation(kind: type) -> None:
    opening = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    # The equation computes the state after the step, `v'`, or the membrane before the reset, `h`.
    assert re.match(r"`([a-z]'|h) = [^`]*\bv\b[^`]*`|`([a-z])' = [^`]*\b\2\b[^`]*`", opening), opening
    assert "Args:" in (kind.__doc__ or "")
