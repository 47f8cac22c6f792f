"""Runs the tests with supported versions of torch, compiles kernels with them, or installs the packages like a user.

    hatch run python release/torch_versions.py test 2.11           runs the suite with torch 2.11, and updates the table
    hatch run python release/torch_versions.py test 2.11 --long    also runs the tests marked long
    hatch run python release/torch_versions.py test 2.15 --python python3.13
    hatch run python release/torch_versions.py kernels 2.11 2.15   compiles kernels for GPUs that are not present
    hatch run python release/torch_versions.py install             installs the five wheels, and runs the README's tour
    hatch run python release/torch_versions.py make 2.11           only creates the environment

Each version has a separate environment of several GB under `.venvs`, which the first call creates. The suite runs in
parts. If a run is interrupted, the next run on the same commit continues with the part that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree

from distributions import ROOT, distributions, in_order
from packaging.version import Version
from wheels import build, counted, peers_for_tests, tools_for_tests, wheel_of

RESULTS = ROOT / "benchmarks" / "results"
TABLE = RESULTS / "torch_versions.md"
KERNELS = RESULTS / "offline_kernels.md"
README = ROOT / "README.md"
MARKS = ("<!-- what release/torch_versions.py wrote -->", "<!-- until here -->")

# Tests in which differences between versions appear most often. They cover tracing, generated kernels, the operator,
# compilers, all backends, and common readouts in Inductor.
SHORT = (
    "packages/flexsn-graph/tests/test_graph_vjp.py",
    "packages/flexsn-codegen/tests/test_codegen_core.py",
    "packages/flexsn-hop/tests/test_hop_package.py",
    "packages/flexsn-hop/tests/test_hop_trace.py",
    "packages/flexsn-runtime/tests/test_runtime_autograd.py",
    "packages/flexsn-nn/tests/test_nn_export.py",
    "tests/test_compiled_interpreted.py",
    "tests/test_compiled_readouts.py",
    "tests/test_compiled_results.py",
    "tests/test_torch_probes.py",
)
# Additional requirements of a version of torch. torch 2.11 requires Triton 3.6, whose interpreter fails with newer
# versions of numpy. The build 2.13.0+cpu lacks Triton, but pip prefers this build if an index contains it.
BOUNDS = {"2.11": ["numpy<2.4"], "2.13": ["torch!=2.13.0+cpu"]}
_OF_GPUS = re.compile("needs (a CUDA|two) GPU")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with one version of torch and everything that the tests use."""

    folder: Path

    @property
    def python(self) -> Path:
        """Python interpreter of the environment."""
        return self.folder / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which Python imports the packages of this source tree.

        The packages are not installed, because several source trees may share an environment.
        """
        sources = [str(member.folder / "src") for member in distributions()]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "VIRTUAL_ENV": str(self.folder)}

    def versions(self) -> dict[str, str]:
        """Returns the versions of Python, torch and Triton in the environment."""
        code = (
            "import json, platform, importlib.metadata as m\n"
            "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in ('torch', 'triton')}}))"
        )
        versions: dict[str, str] = json.loads(subprocess.check_output([self.python, "-c", code], text=True))
        return versions


def make(torch: str, python: str, environments: Path, *, all_tools: bool = False) -> Environment:
    """Returns the environment of a version of torch, and creates it if it does not exist.

    Args:
        torch: version of torch, such as 2.11.
        python: Python interpreter.
        environments: folder of the environments.
        all_tools: True if tools that the running environment lacks are also installed.

    Raises:
        subprocess.CalledProcessError: the Python interpreter does not exist, or pip finds no such torch for it.
    """
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    minor = subprocess.check_output([python, "-c", code], text=True).strip()
    environment = Environment(environments / f"torch-{torch}-python-{minor}")
    complete = environment.folder / "complete"
    if not complete.exists():
        print(f"making {environment.folder}", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", environment.folder], check=True)
        # The requirements of torch determine the version of Triton.
        tools = [
            str(tool) for tool in tools_for_tests(only_installed=not all_tools) if tool.name not in ("torch", "triton")
        ]
        pip: list[str | Path] = [environment.python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch}.*", *tools, *BOUNDS.get(torch, [])], check=True)
        if peers := peers_for_tests(only_installed=not all_tools):
            subprocess.run([*pip, "--no-deps", *map(str, peers)], check=True)
        complete.touch()
    return environment


def commit() -> str:
    """Returns the commit of the tree, followed by a plus sign if files differ from the commit."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


class Extent(Enum):
    """Part of the test suite that runs. The values are the texts in the table."""

    SHORT = "short form"
    SUITE = "suite"
    LONG = "suite, --long"


def parts(extent: Extent) -> list[Sequence[str]]:
    """Returns the arguments of pytest for each part of the suite."""
    if extent is Extent.SHORT:
        return [SHORT]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    long = ["--long"] if extent is Extent.LONG else []
    return [[*long, path] for path in settings["testpaths"]]


def reports(environment: Environment, extent: Extent, options: Sequence[str], at: str) -> list[Path]:
    """Runs the suite, and returns the path of the JUnit report of each part.

    Parts that have already run at this commit do not run again.
    """
    folder = environment.folder / "reports" / at / extent.name.lower()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part in parts(extent):
        name = "short" if extent is Extent.SHORT else part[-1].removeprefix("packages/").replace("/", "-")
        report = folder / f"{name}.xml"
        paths.append(report)
        if report.exists() and not at.endswith("+"):
            print(f"{name}: has already run", flush=True)
            continue
        unfinished = report.with_suffix(".unfinished")
        pytest: list[str | Path] = [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *part]
        pytest.append(f"--junitxml={unfinished}")
        result = subprocess.run(pytest, cwd=ROOT, env=environment.variables, check=False)
        if result.returncode not in (0, 1):  # 1 means that some tests failed
            raise SystemExit(f"pytest ended with {result.returncode} in {name}: the table is not changed")
        unfinished.replace(report)
    return paths


def _packages() -> str:
    versions = {str(member.version) for member in distributions()}
    return ", ".join(sorted(versions)) if len(versions) == 1 else ", ".join(f"{d.name} {d.version}" for d in in_order())


def try_suite(
    torch: str, at: str, python: str, environments: Path, extent: Extent, options: Sequence[str], table: Path
) -> bool:
    """Runs the tests with a version of torch, and writes the row of this version into the table.

    Returns True if some tests passed and none failed.

    Args:
        at: commit of the tree.
    """
    environment = make(torch, python, environments)
    counts = [0, 0, 0]
    notes: list[str] = []
    versions = environment.versions()
    key = f"torch {versions['torch']}, Python {versions['python']}"
    for report in reports(environment, extent, options, at):
        counts = [a + b for a, b in zip(counts, counted(report), strict=True)]
        notes += notable(report, key)
    date = time.strftime("%Y-%m-%d")
    cells = [
        versions["torch"],
        versions["triton"],
        versions["python"],
        f"{_packages()} ({at})",
        extent.value,
        *counts,
        date,
    ]
    row = "| " + " | ".join(map(str, cells)) + " |"
    publish(table, row, key, notes)
    print(row, *notes, sep="\n")
    return counts[0] > 0 and counts[2] == 0


def notable(report: Path, key: str) -> list[str]:
    """Returns a line for each failed test, and for each test that is skipped for a reason other than a missing GPU."""
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"`{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}`"
        if case.find("failure") is not None or case.find("error") is not None:
            lines.append(f"- {key}: {name} failed")
        elif (skipped := case.find("skipped")) is not None:
            reason = " ".join((skipped.get("message") or "").split())
            if not _OF_GPUS.search(reason):
                lines.append(f"- {key}: {name} is skipped: {reason}")
    return lines


_HEAD = """# The tests with each version of torch

Written by `hatch run python release/torch_versions.py test VERSION`: each row is a run of the test suite in a
separate environment, with the Triton that this torch requires, on the CPU (kernels in Triton's interpreter). "Suite"
means the tests that `hatch test` runs, without the tests marked `long`, most of which repeat others with other
parameters. Skipped tests are those that need a GPU, and those listed below.

| torch | Triton | Python | packages (commit) | tests | passed | skipped | failed | date |
|---|---|---|---|---|---|---|---|---|
"""


def publish(table: Path, row: str, key: str, notes: Sequence[str]) -> None:
    """Writes a row and its notes into the table. They replace an earlier row with the same torch, Python and extent."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    identity = _identity(row)
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line) and _identity(line) != identity]
    others = [line for line in text.splitlines() if line.startswith("- ") and not line.startswith(f"- {key}: ")]
    rows = sorted([*rows, row], key=_identity)
    text = _HEAD + "\n".join(rows) + "\n"
    if others or notes:
        text += "\n" + "\n".join(sorted([*others, *notes])) + "\n"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(text, encoding="utf-8")
    if table == TABLE:
        show(text)


def lines_of_table(text: str) -> list[str]:
    """Returns the lines of the table in a text."""
    return [line for line in text.splitlines() if line.startswith("|")]


def show(text: str) -> None:
    """Writes the table into the README, between its markers."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    shown = "\n".join([MARKS[0], *lines_of_table(text), MARKS[1]])
    README.write_text(before + shown + after, encoding="utf-8")


def _identity(row: str) -> tuple[Version, Version, str]:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    torch, python = (Version(".".join(cells[i].split("+")[0].split(".")[:2])) for i in (0, 2))
    return torch, python, cells[4]


# Matches lines such as "lif_hard, forward, size 8388608, sm_90: sm_90: 24 registers, 0 bytes spilled, ..."
_USE = re.compile(
    r"(?P<kernel>\w+, \w+, size \d+, \w+): \w+: (?P<registers>\d+) registers, (?P<spilled>\d+) bytes spilled"
)


def compare_kernels(versions: Iterable[str], python: str, environments: Path) -> None:
    """Compiles kernels with the Triton of each version of torch, and writes a table of their registers and spills."""
    uses: dict[str, dict[str, str]] = {}
    for version in versions:
        environment = make(version, python, environments)
        options = ["-q", "-s", "-p", "no:cacheprovider", "-k", "every_core"]
        command: list[str | Path] = [environment.python, "-m", "pytest", *options, "tests/test_scan_offline.py"]
        result = subprocess.run(
            command, cwd=ROOT, env=environment.variables, stdout=subprocess.PIPE, text=True, check=True
        )
        name = f"Triton {environment.versions()['triton']}"
        uses[name] = {use["kernel"]: f"{use['registers']}, {use['spilled']}" for use in _USE.finditer(result.stdout)}
        assert uses[name], "the test printed nothing"
        print(f"{name}: {len(uses[name])} kernels", flush=True)
    names = list(uses)
    lines = [
        "# Registers and spills of kernels, by the version of Triton",
        "",
        "Written by `hatch run python release/torch_versions.py kernels VERSION ...`: registers and spilled",
        "bytes per thread of the kernels of training steps, compiled without a GPU by tests/test_scan_offline.py.",
        "",
        f"| kernel | {' | '.join(names)} | |",
        "|---" * (len(names) + 2) + "|",
    ]
    for kernel in uses[names[0]]:
        cells = [uses[name].get(kernel, "none") for name in names]
        ending = " | |" if len(set(cells)) == 1 else " | differs |"
        lines.append(f"| {kernel} | {' | '.join(cells)}{ending}")
    KERNELS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def tour() -> str:
    """Returns the README's five-minute tour as a script."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## From nothing to a neuron.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None, "README.md has no tour"
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", section[0], re.MULTILINE | re.DOTALL))


def try_installation(python: str) -> None:
    """Installs the five wheels and the newest versions of their requirements, and runs the tour without other packages.

    Raises:
        subprocess.CalledProcessError: pip or the tour failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheels = []
        for member in in_order():
            build(member, folder)
            wheels.append(wheel_of(member, folder))
        environment = Environment(folder / "environment")
        subprocess.run([python, "-m", "venv", environment.folder], check=True)
        subprocess.run([environment.python, "-m", "pip", "install", "--quiet", *wheels], check=True)
        (folder / "tour.py").write_text(tour(), encoding="utf-8")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
        subprocess.run([environment.python, "tour.py"], cwd=folder, env=variables, check=True)
        print("the tour ran with", environment.versions())


def main(arguments: Sequence[str]) -> int:
    """Runs one of the four commands."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="torch_versions", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["test", "kernels", "install", "make"])
    parser.add_argument("versions", nargs="*", help="versions of torch, such as 2.11")
    parser.add_argument("--python", default=sys.executable, help="an interpreter (default: the current one)")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venvs", help="folder of the environments (default: .venvs)"
    )
    extent = parser.add_mutually_exclusive_group()
    for name, words in (
        ("short", "run only a few files, which show most failures"),
        ("long", "also run tests marked long"),
    ):
        extent.add_argument(
            f"--{name}",
            dest="extent",
            action="store_const",
            const=Extent[name.upper()],
            default=Extent.SUITE,
            help=f"test: {words}",
        )
    parser.add_argument("--all-tools", action="store_true", help="make: also install tools that are not installed here")
    parser.add_argument("-n", default="2", help="test: processes (default: 2)")
    parser.add_argument("--table", type=Path, default=TABLE, help="test: file with the table")
    parser.add_argument(
        "--pytest", default="", help='test: further options for pytest, as one string: --pytest="-k lif"'
    )
    chosen = parser.parse_intermixed_args(arguments)
    if (chosen.command == "install") == bool(chosen.versions):
        parser.error("test, kernels and make need versions of torch, install uses the newest")
    environments = chosen.environments.resolve()
    if chosen.command == "install":
        try_installation(chosen.python)
        return 0
    if chosen.command == "kernels":
        compare_kernels(chosen.versions, chosen.python, environments)
        return 0
    if chosen.command == "make":
        for version in chosen.versions:
            make(version, chosen.python, environments, all_tools=chosen.all_tools)
        return 0
    options = [*(["-n", chosen.n, "--dist", "loadfile"] if chosen.n != "0" else []), *chosen.pytest.split()]
    at = commit()  # determined first, because new rows change the tree
    passed = [
        try_suite(version, at, chosen.python, environments, chosen.extent, options, chosen.table)
        for version in chosen.versions
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
