"""The phrases by which `pointwise` rewords the messages of flexsn-graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexsn_graph
from flexsn_codegen.functions import _words


def _list_texts(path: Path) -> Iterator[str]:
    """The strings of a file except for docstrings, with `{}` for each value in an f-string."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    excluded = {node.value for node in nodes if isinstance(node, ast.Expr)}
    excluded |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in excluded:
            yield node.value


@pytest.fixture(scope="module")
def replaced() -> set[str]:
    """The phrases that are replaced in at least one text of flexsn-graph."""
    phrases = set()
    for path in Path(flexsn_graph.__file__).parent.rglob("*.py"):
        for text in _list_texts(path):
            for phrase, replacement in _words._PHRASES:
                reworded = re.sub(phrase, lambda _, replacement=replacement: replacement, text)  # type: ignore[misc]
                if reworded != text:
                    phrases.add(phrase)
                text = reworded
    return phrases


@pytest.mark.parametrize("phrase", [phrase for phrase, _ in _words._PHRASES])
def test_phrase_occurs_in_a_message_of_graph(phrase: str, replaced: set[str]) -> None:
    assert phrase in replaced
