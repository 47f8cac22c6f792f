"""The mark `long`: marked tests only run with `--long`, except for the parameters in `all_but`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
import pytest

@pytest.mark.long
def test_waits(): ...

@pytest.mark.long(all_but=["lif-*", "if-2"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["if", "lif"])
def test_keeps_some(name, number): ...

def test_is_not_marked(): ...
"""
MISTAKEN = """
import pytest

@pytest.mark.long(all_but=["alif"])
@pytest.mark.parametrize("name", ["if", "lif"])
def test_keeps_none(name): ...
"""


# Two collections run in one process, because the imports of conftest.py take most of the time.
COLLECTS = """
import json, sys
import pytest

for options in json.loads(sys.argv[1]):
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *options])
    print("----")
"""


def collect(folder: Path, *runs: list[str]) -> list[tuple[list[str], str]]:
    """Returns the names of the collected tests and the output of pytest, for the options of each run."""
    process = subprocess.run(
        [sys.executable, "-c", COLLECTS, json.dumps(runs)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = process.stdout.split("----\n")[: len(runs)]
    return [
        ([line.partition("::")[2] for line in text.splitlines() if line.startswith("test_a.py::")], text)
        for text in outputs
    ]


def test_long_mark_selects_tests(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_a.py").write_text(SOURCE)
    (tmp_path / "test_b.py").write_text(MISTAKEN)
    expected = ["test_keeps_some[if-2]", "test_keeps_some[lif-1]", "test_keeps_some[lif-2]", "test_is_not_marked"]
    short, long = collect(tmp_path, ["--continue-on-collection-errors", "."], ["--long", "test_a.py"])
    names, output = short
    assert names == expected, output
    assert "(2 deselected)" in output
    assert "test_keeps_none[if]: all_but='alif' fits none of the parameters" in output
    names, output = long
    assert names == ["test_waits", "test_keeps_some[if-1]", *expected], output
