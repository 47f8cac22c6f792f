"""The figure of the neurons. The stored file shows all neurons that the script draws now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import ROOT, load

IMAGE = ROOT / "docs" / "images" / "neurons.svg"


def test_script_draws_all_neurons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load("docs/plot_neurons.py")
    assert script.main(["--out", str(tmp_path / "drawn.svg")]) == 0
    assert capsys.readouterr().out.startswith(f"{len(script.neurons())} neurons in ")
    figure, stored = (tmp_path / "drawn.svg").read_text(), IMAGE.read_text()
    for title in map(script.title, script.neurons()):
        assert f">{title}<" in figure, title
        assert f">{title}<" in stored, f"{title} is not in {IMAGE.name}: run python docs/plot_neurons.py"


def test_drawn_neurons_fire() -> None:
    """Checks that each drawn neuron fires in some steps and is silent in other steps; for `LI` and `LIAF`, that the
    output is analog. If this test fails, choose other values in `SHOWN`.
    """
    script = load("docs/plot_neurons.py")
    for kind in script.neurons():
        _, membrane, output = script.response(kind)
        assert membrane.isfinite().all()
        if kind.__name__ in {"LI", "LIAF"}:
            assert not torch.equal(output, output.round()), "the output is analog"
        else:
            assert 0 < output.count_nonzero() < script.STEPS, script.title(kind)


def test_page_lists_all_neurons() -> None:
    page = (ROOT / "docs" / "neurons.md").read_text(encoding="utf-8")
    names = [kind.__name__ for kind in load("docs/plot_neurons.py").neurons()]
    assert [name for name in names if f"| `{name}`" not in page] == []
