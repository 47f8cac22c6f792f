"""Versions of the packages in this repository. Each version is in the ranges that the other packages require."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def read_version(distribution: str) -> Version:
    """Reads `__version__` without importing the package, because an installed copy may have another version."""
    module = distribution.replace("-", "_")
    source = ROOT / "packages" / distribution / "src" / module / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return Version(ast.literal_eval(node.value))
    raise LookupError(f"{source} assigns no __version__")


def read_requirements(package: Path) -> list[Requirement]:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


SIBLINGS = [
    pytest.param(requirement, id=f"{package.name}-requires-{requirement.name}")
    for package in PACKAGES
    for requirement in read_requirements(package)
    if requirement.name.startswith("flexsn")
]


def test_environments_with_one_folder_have_equal_dependencies() -> None:
    """Checks that two environments that share one `.venv` have equal dependencies. Otherwise, each run would change the
    `.venv`.
    """
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    assert environments["hatch-test"]["dependencies"] == environments["default"]["dependencies"]


def test_there_are_five_packages() -> None:
    assert [package.name for package in PACKAGES] == [
        "flexsn-codegen",
        "flexsn-graph",
        "flexsn-hop",
        "flexsn-nn",
        "flexsn-runtime",
    ]


def test_codegen_runtime_and_nn_declare_their_siblings() -> None:
    assert len(SIBLINGS) == 6


@pytest.mark.parametrize("requirement", SIBLINGS)
def test_range_admits_the_sibling(requirement: Requirement) -> None:
    version = read_version(requirement.name)
    assert requirement.specifier.contains(version, prereleases=True), (
        f"{requirement} does not admit {requirement.name} {version}"
    )


@pytest.mark.parametrize("requirement", SIBLINGS)
def test_range_is_open_below_the_next_breaking_version(requirement: Requirement) -> None:
    """Checks that a range has a lower and an upper bound. A pinned version would tie the releases of packages together,
    and a range without an upper bound would admit a breaking release.
    """
    assert sorted(specifier.operator for specifier in requirement.specifier) == ["<", ">="]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_third_party_requirements_are_lower_bounds_only(package: Path) -> None:
    for requirement in read_requirements(package):
        if not requirement.name.startswith("flexsn"):
            operators = [specifier.operator for specifier in requirement.specifier]
            assert operators == [">="], f"{requirement}: a requirement only has a lower bound"
