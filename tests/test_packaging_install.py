"""Commands in the documents that install FlexSN. They name all required packages, and a user can run them unchanged."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
from distributions import ROOT, Distribution, distributions, with_siblings
from environments import Environment, is_here
from packaging.requirements import Requirement
from wheels import build

DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "installing.md", *sorted(ROOT.glob("packages/*/README.md"))]
# A command on its own line, in a table cell, or within a sentence.
COMMAND = re.compile(r"^(pip install [^`\n]*)$|`(pip install [^`\n]*)`", re.MULTILINE)
NAMES = tuple(distribution.name for distribution in distributions())


def find_commands(document: Path) -> list[str]:
    """Returns the commands in a document that install FlexSN, without commands that install tools such as hatch."""
    commands = [
        line_command or inline_command
        for line_command, inline_command in COMMAND.findall(document.read_text(encoding="utf-8"))
    ]
    return [command for command in commands if "packages/" in command or "dist/" in command]


COMMANDS: dict[str, list[str]] = defaultdict(list)
for document in DOCUMENTS:
    for command in find_commands(document):
        COMMANDS[command].append(str(document.relative_to(ROOT)))


def list_installed(command: str) -> tuple[str, ...]:
    """Returns the distributions that a command installs."""
    targets = [re.split(r"[\[]", part)[0] for part in shlex.split(command)[2:]]
    if any(target in {"./packages/*", "dist/*.whl"} for target in targets):
        return NAMES
    stems = [Path(target).name.removesuffix("-*.whl").replace("_", "-") for target in targets]
    assert set(stems) <= set(NAMES), command
    return tuple(sorted(stems))


def list_required(distribution: Distribution) -> tuple[str, ...]:
    return tuple(sorted(member.name for member in with_siblings(distribution)))


def list_dependencies(distribution: Distribution) -> set[str]:
    """Returns the distributions that `distribution` and its siblings require, except torch."""
    needs = {requirement.name for member in with_siblings(distribution) for requirement in member.requirements}
    return needs - {"torch"}


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_commands_name_all_requirements(distribution: Distribution) -> None:
    """Checks the commands in the README of a package, and in the table of packages in docs/installing.md."""
    readme = find_commands(distribution.folder / "README.md")
    assert readme, "the README of the package contains no command that installs the package"
    assert {list_installed(command) for command in readme} == {list_required(distribution)}
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{distribution.name}]")]
    (command,) = COMMAND.findall(row)
    assert list_installed(command[1]) == list_required(distribution)


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_table_lists_installed_packages(distribution: Distribution) -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{distribution.name}]")]
    dependencies = set(row.rstrip(" |").rpartition("|")[2].strip().split(", "))
    if "all of these" in dependencies:
        others = [other for other in distributions() if other != distribution]
        dependencies = (dependencies - {"all of these"}).union(
            *map(list_dependencies, others), (other.name for other in others)
        )
    assert dependencies == (list_dependencies(distribution) or {"nothing"})


def test_page_names_every_extra() -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    extras = [
        (f"{distribution.name}[{extra}]", [Requirement(line).name for line in lines])
        for distribution in distributions()
        for extra, lines in distribution.project.get("optional-dependencies", {}).items()
    ]
    assert extras
    missing = [
        name for name, needs in extras if not re.search(rf"^\| `{re.escape(name)}` .*{needs[0]} \|$", page, re.M)
    ]
    assert missing == []


@pytest.fixture(scope="module")
def wheels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    for distribution in distributions():
        build(distribution, folder / "dist")
    return folder


@pytest.mark.long(all_but=["pip install ./packages/[*]"])
@pytest.mark.wheels
@pytest.mark.parametrize("command", COMMANDS)
def test_command_installs_the_named_packages(command: str, wheels_folder: Path, tmp_path: Path) -> None:
    """Checks a command in an environment that contains third-party packages, but not FlexSN. Nothing is downloaded."""
    members = [distribution for distribution in distributions() if distribution.name in list_installed(command)]
    needs = [requirement for member in members for requirement in member.requirements]
    extras = [Requirement("hatchling"), Requirement("matplotlib"), Requirement("nir")]
    third_party = [requirement for requirement in [*needs, *extras] if requirement.name not in NAMES]
    environment = Environment(tmp_path / "environment", third_party)
    # With these options, pip downloads neither packages nor a build backend.
    pip = 'pip() { python -m pip "$@" --quiet --no-index --no-build-isolation; }'
    cwd = wheels_folder if "dist/" in command else ROOT
    environment.run("bash", "-c", f"{pip}; {command}", cwd=cwd)
    installed = {distribution.name: is_here(environment, distribution.module) for distribution in distributions()}
    assert installed == {name: True if name in list_installed(command) else None for name in NAMES}


@pytest.mark.wheels
def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    """Checks that pip does not install the runtime without the folders of the packages that it requires."""
    needs = [requirement for member in distributions() for requirement in member.requirements]
    third_party = [requirement for requirement in [*needs, Requirement("hatchling")] if requirement.name not in NAMES]
    environment = Environment(tmp_path / "environment", third_party)
    with pytest.raises(RuntimeError, match="No matching distribution found for flexsn-"):
        environment.install("./packages/flexsn-runtime", cwd=ROOT)
