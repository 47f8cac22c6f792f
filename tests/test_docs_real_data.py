"""The README's table of accuracies is that of the kept results."""

from __future__ import annotations

import re

from scripts import ROOT


def cells(path: str, start: str) -> list[str]:
    """Cells of the row that begins with `start`."""
    row = re.search(rf"^\s*\| {start}.*\|$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    return [cell.strip() for cell in row[0].strip().strip("|").split("|")]


def test_the_readme_has_the_kept_numbers() -> None:
    _, _, *kept = cells("benchmarks/results/real_data.md", "digits")
    shown = cells("README.md", "scikit-learn's digits")[1:]
    assert shown[:2] == kept[:2]
    assert shown[3:5] == kept[3:5]
    assert kept[2].startswith(shown[2])
    assert kept[5].startswith("97%")
    assert shown[5].startswith("97%")
