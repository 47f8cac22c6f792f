"""The distributions of this repository, with their metadata, and in the order of their dependencies."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Distribution:
    """One of the packages under `packages/`."""

    name: str

    @property
    def folder(self) -> Path:
        """Folder of the distribution's `pyproject.toml`."""
        return ROOT / "packages" / self.name

    @property
    def module(self) -> str:
        """Name under which the package is imported."""
        return self.name.replace("-", "_")

    @property
    def project(self) -> dict[str, Any]:
        """Table `[project]` of the distribution's `pyproject.toml`."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return table

    @property
    def version(self) -> Version:
        """Version in the source. It is read without an import, because an installed copy may have another version."""
        path = self.folder / "src" / self.module / "__init__.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
                return Version(ast.literal_eval(node.value))
        raise LookupError(f"{path} assigns no __version__")

    @property
    def requirements(self) -> list[Requirement]:
        """Requirements of the distribution, without those of extras."""
        return [Requirement(line) for line in self.project["dependencies"]]

    @property
    def siblings(self) -> list[Distribution]:
        """Distributions of this repository that this distribution requires directly."""
        names = {distribution.name for distribution in distributions()}
        return [Distribution(needed.name) for needed in self.requirements if needed.name in names]


@cache
def distributions() -> tuple[Distribution, ...]:
    """Returns all distributions, sorted by name."""
    return tuple(Distribution(path.parent.name) for path in sorted(ROOT.glob("packages/*/pyproject.toml")))


def with_siblings(distribution: Distribution) -> list[Distribution]:
    """Returns the siblings that `distribution` needs, directly or indirectly, followed by `distribution` itself.

    Each sibling follows the distributions that it requires.
    """
    members: list[Distribution] = []
    for sibling in distribution.siblings:
        members += [needed for needed in with_siblings(sibling) if needed not in members]
    return [*members, distribution]


def in_order() -> list[Distribution]:
    """Returns all distributions in the order of publication: each one after the distributions that it requires."""
    ordered: list[Distribution] = []
    for distribution in distributions():
        ordered += [needed for needed in with_siblings(distribution) if needed not in ordered]
    return ordered
