"""Builds the distributions, and runs the tests of each distribution with its installed wheel.

    hatch run release:build                          builds every sdist, and a wheel from it, into dist/
    hatch run python release/wheels.py test --long   installs each wheel separately, and runs all its tests

Names after the command select distributions, as in `... build flexsn-graph`. The tests do not use the source tree. Each
distribution is installed from its wheel into a separate environment, together with the wheels of the siblings that it
requires, and without the other siblings. The tests are taken from the sdist of the distribution. Third-party packages
are linked from the running environment, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from distributions import ROOT, Distribution, distributions, in_order, with_siblings
from environments import Environment, is_here
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def stem(distribution: Distribution) -> str:
    """Returns the common prefix of the file names of a sdist and its wheel, such as `flexsn_graph-0.1.0`."""
    return f"{distribution.module}-{distribution.version}"


def sdist_of(distribution: Distribution, folder: Path) -> Path:
    """Returns the path of the distribution's sdist in `folder`."""
    return folder / f"{stem(distribution)}.tar.gz"


def wheel_of(distribution: Distribution, folder: Path) -> Path:
    """Returns the path of the distribution's wheel in `folder`."""
    return folder / f"{stem(distribution)}-py3-none-any.whl"


def unpacked_sdist(distribution: Distribution, folder: Path, into: Path) -> Path:
    """Unpacks the distribution's sdist from `folder` into `into`, and returns the path of the unpacked folder."""
    with tarfile.open(sdist_of(distribution, folder)) as archive:
        archive.extractall(into, filter="data")
    return into / stem(distribution)


def build(distribution: Distribution, folder: Path) -> list[Path]:
    """Builds the sdist into `folder`, then builds the wheel from the contents of the sdist, and returns both paths.

    Raises:
        subprocess.CalledProcessError: the build backend failed.
    """
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder.resolve())]
    subprocess.run([*hatchling, "-t", "sdist"], cwd=distribution.folder, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as scratch:
        source = unpacked_sdist(distribution, folder, Path(scratch))
        subprocess.run([*hatchling, "-t", "wheel"], cwd=source, check=True, stdout=subprocess.DEVNULL)
    return [sdist_of(distribution, folder), wheel_of(distribution, folder)]


def is_installed(requirement: Requirement) -> bool:
    """Returns True if the running environment contains the required distribution."""
    try:
        version(requirement.name)
    except PackageNotFoundError:
        return False
    return True


def default_environment() -> dict[str, Any]:
    """Returns the development environment from `hatch.toml`."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))
    default: dict[str, Any] = settings["envs"]["default"]
    return default


def tools_for_tests(*, only_installed: bool = True) -> list[Requirement]:
    """Returns the packages that the tests use, according to `hatch.toml`. Tests whose packages are missing are skipped.

    Any installed version of torch and Triton is accepted, because versions other than the pinned ones are also tested.

    Args:
        only_installed: True if packages that the running environment lacks are left out.
    """
    tools = [Requirement(word) for word in default_environment()["dependencies"]]
    if only_installed:
        tools = list(filter(is_installed, tools))
    for tool in tools:
        if tool.name in ("torch", "triton"):
            tool.specifier = SpecifierSet()
    return tools


def peers_for_tests(*, only_installed: bool = True) -> list[Requirement]:
    """Returns the packages that `hatch run peers` installs without their dependencies.

    Args:
        only_installed: True if packages that the running environment lacks are left out.
    """
    words = default_environment()["scripts"]["peers"].split()
    peers = [Requirement(word) for word in words if "==" in word]
    return list(filter(is_installed, peers)) if only_installed else peers


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of the tests of one distribution, with their duration and output."""

    distribution: Distribution
    passed: int
    skipped: int
    failed: int
    seconds: float
    output: str

    @property
    def ok(self) -> bool:
        """True if some tests passed and none failed."""
        return self.passed > 0 and self.failed == 0


def counted(report: Path) -> tuple[int, int, int]:
    """Returns the counts of passed, skipped and failed tests in a JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    return len(cases) - skipped - failed, skipped, failed


def run_tests(
    distribution: Distribution, folder: Path, files: Sequence[str] = (), options: Sequence[str] = ()
) -> Outcome:
    """Installs the wheel of `distribution` from `folder`, together with the wheels of its siblings, and runs the tests
    of its sdist.

    Args:
        distribution: distribution whose tests run.
        folder: folder with the sdist and the wheel of `distribution`, and with the wheels of its siblings.
        files: names of the test files to run; empty for all files.
        options: additional options for pytest.

    Raises:
        FileNotFoundError: `folder` lacks one of the files.
        RuntimeError: the wheel cannot be installed, a package of this repository is present although it is not
            required, or a required package is not imported from its wheel.
    """
    members = with_siblings(distribution)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        peers = [peer.name for peer in peers_for_tests()]
        environment = Environment(Path(scratch) / "environment", tools_for_tests(), peers)
        environment.install(*(wheel_of(member, folder).resolve(strict=True) for member in members), cwd=Path(scratch))
        others = [other for other in distributions() if other not in members]
        strangers = [other.name for other in others if is_here(environment, other.module) is not None]
        elsewhere = [member.name for member in members if is_here(environment, member.module) is not True]
        if strangers or elsewhere:
            raise RuntimeError(f"imported, but not required: {strangers}; not from the wheel: {elsewhere}")
        # The folder in which the tests run has the layout of the repository, but no sources of the packages.
        tree = Path(scratch) / "tree"
        tree.mkdir()
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, tree)
        source = unpacked_sdist(distribution, folder, Path(scratch))
        shutil.rmtree(source / "src")
        shutil.copytree(source, tree / "packages" / distribution.name)
        report = Path(scratch) / "report.xml"
        result = environment.run(
            *(environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(f"packages/{distribution.name}/tests/{name}" for name in files or [""]),
            *options,
            cwd=tree,
            check=False,
        )
        passed, skipped, failed = counted(report) if report.exists() else (0, 0, 1)
        failed += result.returncode != 0 and failed == 0  # pytest itself failed, without a failed test
    return Outcome(distribution, passed, skipped, failed, time.monotonic() - start, result.stdout)


def table(outcomes: Sequence[Outcome], folder: Path, long: bool) -> str:
    """Returns a page in Markdown with the outcomes."""
    command = f"release/wheels.py test{' --long' if long else ''}"
    extent = "All tests of the sdist ran." if long else "The tests of the sdist ran, except those marked `long`."
    lines = [
        "# The tests of each distribution, run against its installed wheel",
        "",
        f"Written by `hatch run python {command}`. Each wheel was built from its sdist, and installed",
        f"into a separate environment with the wheels of the siblings in its row. {extent}",
        "",
        f"Python {platform.python_version()}, torch {version('torch')}, {platform.system()} {platform.machine()}.",
        "",
        "| distribution | wheel, KiB | sdist, KiB | with | passed | skipped | failed | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        distribution = outcome.distribution
        sizes = [path(distribution, folder).stat().st_size // 1024 for path in (wheel_of, sdist_of)]
        siblings = ", ".join(member.name for member in with_siblings(distribution)[:-1]) or "nothing"
        results = [outcome.passed, outcome.skipped, outcome.failed, round(outcome.seconds)]
        cells = [f"{distribution.name} {distribution.version}", *sizes, siblings, *results]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Builds or tests the distributions, and prints the outcome."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="wheels", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build", "test"])
    parser.add_argument("names", nargs="*", help="distributions (default: all five)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the built files (default: dist)")
    parser.add_argument("--output", type=Path, help="test: also write the table to this file")
    parser.add_argument("--long", action="store_true", help="test: also run tests marked long, as before a release")
    parser.add_argument("--pytest", default="", help='options for pytest, as one string: --pytest="-n 2"')
    chosen = parser.parse_intermixed_args(arguments)
    names = {distribution.name for distribution in distributions()}
    if unknown := set(chosen.names) - names:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    selected = [distribution for distribution in in_order() if not chosen.names or distribution.name in chosen.names]

    if chosen.command == "build":
        for distribution in selected:
            print(*(path.name for path in build(distribution, chosen.dist)), sep="\n", flush=True)
        return 0

    outcomes = []
    for distribution in selected:
        outcome = run_tests(distribution, chosen.dist, options=[*["--long"] * chosen.long, *chosen.pytest.split()])
        outcomes.append(outcome)
        if not outcome.ok:
            print(outcome.output)
        print(
            f"{distribution.name}: {outcome.passed} passed, {outcome.skipped} skipped, {outcome.failed} failed",
            flush=True,
        )
    text = table(outcomes, chosen.dist, chosen.long)
    print(text)
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
