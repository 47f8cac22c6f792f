"""Phrases and names that the style rules forbid. Their counts do not grow."""

from __future__ import annotations

import json

import prose
import pytest


def test_each_rule_detects_a_phrase() -> None:
    source = '''"""Whether x."""


def f(found: int) -> None:
    """What it tells, to whoever wants so many."""  # asks anew
'''
    assert [rule for rule, *_ in prose.places(source)] == [
        "begins with Whether",
        "begins with What",
        "people for objects",
        "objects that tell",
        "objects that want",
        "numbers without a name",
        "objects that ask",
        "anew",
        "values without a noun",
    ]


STORED = json.loads(prose.STORED_COUNTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", STORED)
def test_counts_do_not_grow(package: str) -> None:
    counts = prose.counts()[package]
    increases = {
        rule: (STORED[package][rule], count) for rule, count in counts.items() if count > STORED[package][rule]
    }
    assert not increases, "reword these sentences, or rename these values; `python tests/prose.py` prints each place"
