"""The figure of the surrogates. It shows all surrogates, like the figure that the script draws."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from scripts import ROOT, load

from flexsn_nn import surrogate

IMAGE = ROOT / "docs" / "images" / "surrogates.svg"


def list_surrogates() -> set[str]:
    """Returns the names of all surrogate classes, without aliases and without the base class."""
    classes = [getattr(surrogate, name) for name in surrogate.__all__ if inspect.isclass(getattr(surrogate, name))]
    return {kind.__name__ for kind in classes if kind is not surrogate.Surrogate}


def test_script_draws_all_surrogates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load("docs/plot_surrogates.py")
    assert script.main(["--out", str(tmp_path / "drawn.svg")]) == 0
    assert capsys.readouterr().out.startswith(f"{len(list_surrogates())} surrogates in ")
    titles = [script.title(g) for g in script.surrogates()]
    assert {title.split("(")[0] for title in titles} == list_surrogates()
    figure, stored = (tmp_path / "drawn.svg").read_text(), IMAGE.read_text()
    for title in titles:
        assert f">{title}<" in figure, title
        assert f">{title}<" in stored, f"{title} is not in {IMAGE.name}: run python docs/plot_surrogates.py"


def test_page_lists_all_surrogates() -> None:
    page = (ROOT / "docs" / "surrogates.md").read_text(encoding="utf-8")
    missing = [name for name in sorted(list_surrogates()) if f"| `{name}" not in page]
    assert missing == []
