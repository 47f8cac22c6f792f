"""Links in the documents. They point to existing files, and to existing headings in these files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def read_prose(path: Path) -> str:
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def list_anchors(path: Path) -> set[str]:
    """Returns the anchors of the headings, as they appear in links: in lower case, without punctuation, and with
    hyphens instead of spaces.
    """
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(read_prose(path))}


def find_broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(read_prose(path)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # the link leads to another site
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in list_anchors(file)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(document: Path) -> None:
    assert find_broken_links(document) == []


def test_every_page_is_in_the_index() -> None:
    index = read_prose(ROOT / "docs" / "README.md")
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.py")]
    missing = [path.name for path in pages if path.name != "README.md" and f"[{path.name}]" not in index]
    assert missing == []


def test_broken_links_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One & two\n\n[a](#one--two) [b](page.md) [c](https://x.org) [d](none.md) [e](#three)\n")
    assert find_broken_links(page) == ["none.md", "#three"]
