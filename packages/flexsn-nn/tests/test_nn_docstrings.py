"""The examples in the docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import flexsn_nn

MODULES = sorted(info.name for info in pkgutil.walk_packages(flexsn_nn.__path__, prefix="flexsn_nn.") if not info.ispkg)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert results.failed == 0


def test_some_are_found() -> None:
    finder = doctest.DocTestFinder()
    with_examples = [
        name for name in MODULES if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]
    assert len(with_examples) >= 5
