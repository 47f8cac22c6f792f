"""Figures, such as accuracies, that the documents quote for the examples. They equal the stored table, and every example
has a figure.
"""

from __future__ import annotations

import re

import pytest
from scripts import ROOT, load

benchmark = load("benchmarks/example_figures.py")
KEPT = benchmark.kept(ROOT / "benchmarks" / "results" / "example_figures.md")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
PAGES = {"datasets/images": "data-images", "datasets/events": "data-events", "datasets/audio": "data-audio"}


def test_every_example_has_a_figure() -> None:
    folder = ROOT / "examples"
    examples = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("**/*.py")]
    assert set(examples) - {"datasets/training"} == benchmark.FIGURES.keys() == KEPT.keys()


@pytest.mark.parametrize("name", benchmark.FIGURES)
def test_documents_have_the_figures_of_the_table(name: str) -> None:
    row = re.search(rf"^\| \[\S+\]\(\.\./examples/{name}\.py\) \|.*$", INDEX, re.MULTILINE)
    assert row is not None
    assert row[0].endswith(f"| {KEPT[name]} |")
    if name in PAGES:
        page = (ROOT / "docs" / f"{PAGES[name]}.md").read_text(encoding="utf-8")
        assert f"    {KEPT[name]}\n" in page
