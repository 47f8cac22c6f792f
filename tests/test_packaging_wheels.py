"""Wheels that work with only their declared requirements.

The tests build the five wheels. They install each wheel into its own folder, together with the siblings that its
metadata require, and import all modules from this folder. The Python process that imports them finds modules in only
one other folder, which contains links to the third-party distributions that the metadata require. So a package that is
used but not declared is missing, even if the environment contains it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from distributions import ROOT, Distribution, distributions
from environments import link_distributions, needed, third_party
from packaging.requirements import Requirement
from wheels import build, run_tests, wheel_of

PACKAGES = [distribution.name for distribution in distributions()]
WITHOUT_SIBLINGS = {"flexsn-graph", "flexsn-hop"}
WITHOUT_TRITON = {"flexsn-graph", "flexsn-hop"}
# One file of quick tests for each wheel. `release/wheels.py test` runs all tests of a wheel.
QUICK = {
    "flexsn-codegen": "test_codegen_torch2triton.py",
    "flexsn-graph": "test_graph_info.py",
    "flexsn-hop": "test_hop_scan.py",
    "flexsn-nn": "test_nn_encoding.py",
    "flexsn-runtime": "test_runtime_numerics.py",
}

pytestmark = [pytest.mark.wheels, pytest.mark.xdist_group("wheels")]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A built wheel, and the requirements in its metadata."""

    path: Path
    requirements: tuple[Requirement, ...]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # conftest.py turns on Triton's interpreter. Here, the interpreter is off, as it is for users, because the
    # interpreter needs packages that Triton does not declare.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the sdists, and the wheels from these sdists, and returns their folder. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("somewhere") / "dist"
    for distribution in distributions():
        build(distribution, folder)
    return folder


@pytest.fixture(scope="module")
def wheels(dist: Path) -> dict[str, Wheel]:
    built = {}
    for distribution in distributions():
        path = wheel_of(distribution, dist)
        with ZipFile(path) as archive:
            (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            text = archive.read(metadata).decode()
        lines = Parser().parsestr(text).get_all("Requires-Dist", [])
        built[distribution.name] = Wheel(path, tuple(needed(map(Requirement, lines))))
    return built


def with_siblings(name: str, wheels: dict[str, Wheel]) -> list[str]:
    """Returns `name` and the siblings that it requires, directly or indirectly."""
    members = [name]
    for member in members:
        names = [requirement.name for requirement in wheels[member].requirements]
        members += [other for other in names if other in wheels and other not in members]
    return members


def import_isolated(name: str, wheels: dict[str, Wheel], folder: Path) -> dict[str, Any]:
    """Installs `name` and its siblings under `folder`, imports all modules from `folder`, and returns a report of the
    imports.
    """
    members = with_siblings(name, wheels)
    target, links = folder / "target", folder / "third_party"
    links.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--target", target, *(wheels[member].path for member in members))
    requirements = [r for m in members for r in wheels[m].requirements if r.name not in wheels]
    names = third_party(requirements)
    if "triton" not in {requirement.name for requirement in requirements}:
        names -= {"triton"}  # some builds of torch require Triton, but the package does not
    link_distributions(names, links)
    script = ROOT / "tests" / "isolated_import.py"
    output = run(sys.executable, "-I", "-S", script, name.replace("-", "_"), target, links, cwd=folder)
    report: dict[str, Any] = json.loads(output)
    origins = {member.replace("-", "_"): str(target / member.replace("-", "_") / "__init__.py") for member in members}
    assert report["visible"] == origins, "other flexsn packages are visible, or packages in another folder"
    return report


@pytest.mark.parametrize("name", PACKAGES)
def test_wheel_contains_required_files(name: str, wheels: dict[str, Wheel]) -> None:
    module = name.replace("-", "_")
    with ZipFile(wheels[name].path) as archive:
        names = archive.namelist()
    assert f"{module}/__init__.py" in names
    assert f"{module}/py.typed" in names
    assert any(entry.endswith(".dist-info/licenses/LICENSE") for entry in names)
    assert {entry.split("/")[0].split("-")[0] for entry in names} == {module}


@pytest.mark.parametrize("name", sorted(WITHOUT_SIBLINGS))
def test_package_needs_no_sibling(name: str, wheels: dict[str, Wheel]) -> None:
    assert with_siblings(name, wheels) == [name]


@pytest.mark.parametrize("name", PACKAGES)
def test_wheel_imports_with_its_declared_dependencies_only(name: str, wheels: dict[str, Wheel], tmp_path: Path) -> None:
    report = import_isolated(name, wheels, tmp_path)
    if name in WITHOUT_TRITON:
        assert not report["triton_imported"]
        # torch may import Triton, but the modules of the package must not.
        assert [importer for importer in report["triton_importers"] if importer.startswith("flexsn")] == []


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_own_tests_pass_against_the_installed_wheel(distribution: Distribution, dist: Path) -> None:
    outcome = run_tests(distribution, dist, files=[QUICK[distribution.name]])
    assert outcome.ok, outcome.output


def make_wheel(folder: Path, module: str, source: str, requires: str = "") -> Path:
    """Writes a small wheel without a build, and returns its path. The wheel serves to test the isolation itself."""
    path = folder / f"{module}-0.1.0-py3-none-any.whl"
    info = f"{module}-0.1.0.dist-info"
    lines = f"Requires-Dist: {requires}\n" if requires else ""
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", source)
        name = module.replace("_", "-")
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n"
        archive.writestr(f"{info}/METADATA", header + lines)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_wheels(folder: Path, runtime_source: str, requires: str) -> dict[str, Wheel]:
    needs = tuple(needed([Requirement(requires)] if requires else []))
    return {
        "flexsn-graph": Wheel(make_wheel(folder, "flexsn_graph", ""), ()),
        "flexsn-runtime": Wheel(make_wheel(folder, "flexsn_runtime", runtime_source, requires), needs),
    }


def test_declared_siblings_can_be_imported(tmp_path: Path) -> None:
    wheels = make_wheels(tmp_path, "import flexsn_graph", "flexsn-graph>=0.1")
    import_isolated("flexsn-runtime", wheels, tmp_path)


@pytest.mark.parametrize("undeclared", ["flexsn_graph", "numpy"])
def test_undeclared_dependencies_cannot_be_imported(undeclared: str, tmp_path: Path) -> None:
    """Checks that the import of an undeclared package fails even if the environment contains it."""
    wheels = make_wheels(tmp_path, f"import {undeclared}", "")
    with pytest.raises(AssertionError, match=f"No module named '{undeclared}'"):
        import_isolated("flexsn-runtime", wheels, tmp_path)


def test_attempted_triton_imports_are_recorded(tmp_path: Path) -> None:
    """Checks that an import of Triton is recorded even if the package works without Triton."""
    source = "try:\n    import triton\nexcept ImportError:\n    triton = None\n"
    report = import_isolated("flexsn-runtime", make_wheels(tmp_path, source, ""), tmp_path)
    assert report["triton_importers"] == ["flexsn_runtime"]
