"""Tutorials. They run as scripts, and are converted to pages and notebooks that contain their output and figures."""

from __future__ import annotations

import base64
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, load, one_thread

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
SCRIPT = """# %% [markdown]
# # A title
#
# A text.

# %%
a = 1
print("a is", a)

# %%
from matplotlib import pyplot

pyplot.subplots()
assert a == 1
"""


# Without `--long`, only one tutorial runs, because each build of the site runs all tutorials.
@pytest.mark.long(all_but=["own_neuron"])
@one_thread()
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert text.count("\nassert ") >= 2, "a tutorial has to check its claims by assertions"
    namespace = runpy.run_path(str(path))
    assert namespace["losses"][-1] < 0.5 * namespace["losses"][0]
    namespace["pyplot"].close("all")


def test_there_are_three_tutorials() -> None:
    assert [path.stem for path in TUTORIALS] == ["own_neuron", "recurrent_audio", "sew_network"]


def write_tutorial(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.py"
    path.write_text(text)
    load("docs/site/tutorials.py").write_tutorials(tmp_path)
    return path


def test_scripts_become_pages_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    path = write_tutorial(tmp_path, SCRIPT)
    page = path.with_suffix(".md").read_text()
    assert page.startswith("# A title\n\nA text.\n\n```python\na = 1\nprint")
    assert "a is 1" in page
    assert "](a_0.png)" in page
    picture = (tmp_path / "a_0.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    notebook: dict[str, Any] = json.loads(path.with_suffix(".ipynb").read_text())
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code"]
    assert notebook["cells"][1]["outputs"][0]["text"] == "a is 1\n"
    assert base64.b64decode(notebook["cells"][2]["outputs"][0]["data"]["image/png"]) == picture


def test_error_names_the_line_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        write_tutorial(tmp_path, SCRIPT.replace("a == 1", "a == 2"))
    assert (Path(str(caught.traceback[-1].path)).name, caught.traceback[-1].lineno + 1) == ("a.py", 14)


def test_code_before_the_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="# %%"):
        write_tutorial(tmp_path, "a = 1\n" + SCRIPT)


def test_site_creates_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure = load("docs/site/environment.py").ensure
    hatch = tmp_path / "bin" / "hatch"
    hatch.parent.mkdir()
    hatch.write_text('#!/bin/sh\necho "$@" "$HATCH_ENV_ACTIVE" > called\n')
    hatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(hatch.parent))
    monkeypatch.setenv("HATCH_ENV_ACTIVE", "site")
    assert ensure(tmp_path)
    assert (tmp_path / "called").read_text().split() == ["env", "create"]
    (tmp_path / ".venv/lib/python3.11/site-packages/torch").mkdir(parents=True)
    assert not ensure(tmp_path)
    hatch.unlink()
    (tmp_path / ".venv/lib/python3.11/site-packages/torch").rmdir()
    with pytest.raises(RuntimeError, match="hatch env create"):
        ensure(tmp_path)
