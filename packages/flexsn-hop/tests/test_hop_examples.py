"""The examples in the README and in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flexsn_hop

README = Path(__file__).parents[1] / "README.md"
MODULES = ["flexsn_hop", *(f"flexsn_hop.{m.name}" for m in pkgutil.iter_modules(flexsn_hop.__path__))]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def test_readme() -> None:
    torch._dynamo.reset()
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_every_public_function_has_an_example_or_names_one() -> None:
    for name in flexsn_hop.__all__:
        thing = getattr(flexsn_hop, name)
        if inspect.isfunction(thing):
            text = thing.__doc__ or ""
            assert ">>>" in text or ":func:" in text, name
