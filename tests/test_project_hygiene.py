"""Requirements for every file and every package of the repository."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))

# Each pattern contains a character class with a single letter, so that this file itself does not match.
TRACES = {
    "a path of one machine": rb"(?<![\w.-])/(?:[w]ork|[o]pt|[r]oot|[h]ome/\w+|[U]sers/\w+)/",
    "a temporary environment": rb"/[t]mp/(?:envs|brief)\b",
    "a machine pool": rb"\b[f]arm\b",
    "a package registry's host": (
        rb"\b(?:[p]ypi\.(?:org|python)|[p]ythonhosted\.org|[d]ownload\.pytorch\.org"
        rb"|[r]egistry\.npmjs|[d]eb\.debian\.org|[c]rates\.io)"
    ),
    "an extra index": rb"--(?:extra-)?[i]ndex-url|--[f]ind-links",
}


def list_project_files() -> list[Path]:
    """Returns the tracked files, and the files that `git add` would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def find_traces(content: bytes) -> list[str]:
    """Returns the first trace of each kind in `content`."""
    return [f"{kind}: {m[0]!r}" for kind, p in TRACES.items() if (m := re.search(p, content))]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = list_project_files()
    assert ROOT / "LICENSE" in files, "git listed no project files"
    results = {str(path.relative_to(ROOT)): traces for path in files if (traces := find_traces(path.read_bytes()))}
    assert results == {}


@pytest.mark.parametrize(
    "text",
    [
        "see /{}/main".format("work"),
        "/{}/wheels".format("opt"),
        "/{}/me/x.py".format("home"),
        "https://{}.org/simple".format("pypi"),
        "a {}m of machines".format("far"),
        "pip install --{} x".format("find-links"),
    ],
)
def test_traces_are_detected(text: str) -> None:
    assert find_traces(text.encode()) != []


@pytest.mark.parametrize("text", ["packages/work/x", "docs/home/", "farmland", "pip install hatch"])
def test_innocent_text_is_accepted(text: str) -> None:
    assert find_traces(text.encode()) == []


# Calls that measure time, or that stop after some time. Character classes keep this file from matching.
CLOCKS = re.compile(
    r"[p]erf_counter|[m]onotonic\(|[p]rocess_time|[t]hread_time|[g]etrusage|os\.[t]imes\(|[e]lapsed_time"
    r"|mark\.[t]imeout|\b[t]imeout="
)


def test_tests_do_not_depend_on_speed() -> None:
    """Checks that tests read no clocks and set no time limits. The time limit in pyproject.toml only ends processes
    that hang.
    """
    files = [ROOT / "conftest.py", *ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]
    results = {str(path.relative_to(ROOT)): clocks for path in files if (clocks := CLOCKS.findall(path.read_text()))}
    assert results == {}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_has_its_documents(package: Path) -> None:
    module = package.name.replace("-", "_")
    documents = ["README.md", "CHANGELOG.md", "LICENSE", f"src/{module}/py.typed"]
    assert [name for name in documents if not (package / name).is_file()] == []
    # The repository and each package contain the license, since a source distribution contains only the folder of its
    # package.
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_names_of_test_files_are_unique() -> None:
    """Checks that no two test files have the same name, because mypy refuses two modules with one name."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]
    files = [path for path in [ROOT / "conftest.py", *files] if "golden" not in path.parts]
    names = Counter(path.name for path in files)
    assert [name for name, count in names.items() if count > 1] == []


def test_names_of_test_files_begin_with_the_package() -> None:
    """Checks that files are named `test_<package>_<concept>.py`, so that the report of a failure begins with the
    package.
    """
    misnamed = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in package.glob("tests/**/test_*.py")
        if not path.name.startswith(f"test_{package.name.removeprefix('flexsn-')}_")
    ]
    assert misnamed == []
