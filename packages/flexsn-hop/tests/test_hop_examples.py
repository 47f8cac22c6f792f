"""The examples in the README and in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexsn_hop

ALONE = Path(__file__).with_name("run_readme_alone.py")
README = Path(__file__).parents[1] / "README.md"
MODULES = ["flexsn_hop", *(f"flexsn_hop.{m.name}" for m in pkgutil.iter_modules(flexsn_hop.__path__))]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def test_readme_runs_with_this_package_alone() -> None:
    """Runs the blocks one after the other in a new process that cannot import any other package of FlexSN."""
    # Torch may be outside of site-packages, because a `.pth` file there may point to it.
    places = [Path(flexsn_hop.__path__[0]).parent, *site.getsitepackages(), Path(torch.__path__[0]).parent]
    folders = list(dict.fromkeys(map(str, places)))
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(ALONE), str(README), *folders], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    ran, siblings = result.stdout.split(maxsplit=1)[-2:]
    assert int(ran) >= 7
    assert siblings.strip() == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_public_functions_have_or_name_an_example() -> None:
    for name in flexsn_hop.__all__:
        thing = getattr(flexsn_hop, name)
        if inspect.isfunction(thing):
            text = thing.__doc__ or ""
            assert ">>>" in text or ":func:" in text, name
