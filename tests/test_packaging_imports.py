"""Packages declare all distributions that they import. A distribution that only a sibling declares is not enough,
because the sibling may require fewer distributions in the future.

Tests of isolated wheels cannot detect such a missing declaration, because the siblings of the wheel are installed, too.
The tests of a package import only helper modules of the same package, because its sdist contains no other helpers.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from distributions import Distribution, distributions, with_siblings
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
DISTRIBUTIONS = {
    **packages_distributions(),
    **{package.name.replace("-", "_"): [package.name] for package in PACKAGES},
}


def list_declared(package: Path) -> set[str]:
    """Returns the distributions that a package requires, including those that only its extras require."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return {canonicalize_name(Requirement(line).name) for lines in groups for line in lines}


def list_imported(source: str) -> set[str]:
    """Returns the top-level modules that `source` imports anywhere, including imports inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def find_undeclared(modules: set[str], declared: set[str], distributions: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the modules that no declared distribution provides."""
    return {
        module
        for module in modules
        if not {canonicalize_name(name) for name in distributions.get(module, [])} & declared
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_declares_its_imports(package: Path) -> None:
    module = package.name.replace("-", "_")
    files = list((package / "src" / module).rglob("*.py"))
    assert files
    modules = set().union(*(list_imported(path.read_text(encoding="utf-8")) for path in files))
    assert find_undeclared(modules - {module}, list_declared(package), DISTRIBUTIONS) == set()


def test_undeclared_imports_are_detected() -> None:
    source = "import os\nfrom . import a\ndef f():\n    import numpy.linalg\n    import torch\n"
    modules = list_imported(source)
    assert modules == {"numpy", "torch"}
    assert find_undeclared(modules, {"torch"}, DISTRIBUTIONS) == {"numpy"}
    assert find_undeclared(modules, {"torch", "numpy"}, DISTRIBUTIONS) == set()
    assert find_undeclared({"no_such_module"}, {"torch"}, DISTRIBUTIONS) == {"no_such_module"}


# Folders with modules that can be imported by name in the repository, but not from the installed wheel.
FOLDERS = ("release", "tests", "examples/datasets", "packages/*/tests")
HELPERS = {path.stem for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")}


def find_foreign(modules: set[str], distribution: Distribution) -> set[str]:
    """Returns the elements of `modules` that the repository contains, but that a test of the installed `distribution`
    cannot import.
    """
    own_helpers = {path.stem for path in (distribution.folder / "tests").glob("*.py")}
    foreign_packages = {other.module for other in distributions() if other not in with_siblings(distribution)}
    return modules & ((HELPERS - own_helpers) | foreign_packages)


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_tests_import_only_their_own_helpers(distribution: Distribution) -> None:
    files = list((distribution.folder / "tests").rglob("*.py"))
    assert files
    modules = set().union(*(list_imported(path.read_text(encoding="utf-8")) for path in files))
    assert find_foreign(modules, distribution) == set()


def test_foreign_helpers_are_detected() -> None:
    modules = {"torch", "graph_cores", "codegen_cores", "scripts", "flexsn_graph", "flexsn_nn"}
    codegen = Distribution("flexsn-codegen")
    assert find_foreign(modules, codegen) == {"graph_cores", "scripts", "flexsn_nn"}
