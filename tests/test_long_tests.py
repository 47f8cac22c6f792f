"""Tests marked `long` wait for `--long`, but for the parameters that they keep."""

from __future__ import annotations

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


def collected(folder: Path, *options: str) -> tuple[list[str], str]:
    """The tests that would run, and all that pytest says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, "."],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if line.startswith("test_a.py::")], done.stdout


def test_what_waits_and_what_does_not(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_a.py").write_text(SOURCE)
    (tmp_path / "test_b.py").write_text(MISTAKEN)
    kept = ["test_keeps_some[if-2]", "test_keeps_some[lif-1]", "test_keeps_some[lif-2]", "test_is_not_marked"]
    found, said = collected(tmp_path, "--continue-on-collection-errors")
    assert found == kept, said
    assert "(2 deselected)" in said
    assert "test_keeps_none[if]: all_but='alif' fits none of the parameters" in said
    (tmp_path / "test_b.py").unlink()
    found, said = collected(tmp_path, "--long")
    assert found == ["test_waits", "test_keeps_some[if-1]", *kept], said
