"""Figures, such as accuracies, that the documents quote for examples. They equal the stored table, and each example has
a figure.
"""

from __future__ import annotations

import re

import pytest
from scripts import ROOT, load

benchmark = load("benchmarks/example_figures.py")
STORED = benchmark.read_figures(ROOT / "benchmarks" / "results" / "example_figures.md")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
PAGES = {"datasets/images": "data-images", "datasets/events": "data-events", "datasets/audio": "data-audio"}


def test_every_example_has_a_figure() -> None:
    folder = ROOT / "examples"
    examples = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("**/*.py")]
    assert set(examples) - {"datasets/training"} == benchmark.FIGURES.keys() == STORED.keys()


@pytest.mark.parametrize("name", benchmark.FIGURES)
def test_documents_quote_the_stored_figures(name: str) -> None:
    row = re.search(rf"^\| \[\S+\]\(\.\./examples/{name}\.py\) \|.*$", INDEX, re.MULTILINE)
    assert row is not None
    assert row[0].endswith(f"| {STORED[name]} |")
    if name in PAGES:
        page = (ROOT / "docs" / f"{PAGES[name]}.md").read_text(encoding="utf-8")
        assert f"    {STORED[name]}\n" in page
