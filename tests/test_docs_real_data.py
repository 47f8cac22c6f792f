"""The README's accuracies and seconds of training. They equal the stored results."""

from __future__ import annotations

import re

import pytest
from scripts import ROOT

NAMES = {
    "digits": "scikit-learn's digits",
    "mnist1d": "MNIST-1D",
    "japanese_vowels": "JapaneseVowels",
    "basic_motions": "BasicMotions",
}


def read_cells(path: str, start: str) -> list[str]:
    """Returns the cells of the table row that begins with `start`."""
    row = re.search(rf"^\s*\| {start}.*\|$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    return [cell.strip() for cell in row[0].strip().strip("|").split("|")]


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_the_stored_accuracies(name: str) -> None:
    _, _, *stored = read_cells("benchmarks/results/real_data.md", name)
    displayed = read_cells("README.md", NAMES[name])[1:]
    assert displayed[:2] == stored[:2]
    assert displayed[3:5] == stored[3:5]
    assert stored[2].startswith(displayed[2])
    assert stored[5].startswith(displayed[5].partition(",")[0])


def test_readme_has_the_stored_seconds() -> None:
    stored = [read_cells("benchmarks/results/real_data_seconds.md", name) for name in NAMES]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for column in (1, 3):
        *first, last = (row[column] for row in stored)
        assert f"{', '.join(first)} and {last} s" in text
