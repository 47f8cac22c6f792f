"""Counts the phrases in docstrings and comments, and the names of values, that the style rules forbid.

    python tests/prose.py            prints each occurrence
    python tests/prose.py --write    stores the counts, which may only decrease

A docstring begins with a noun or a verb. Objects are not people: verbs of speech and desire, and pronouns for people,
do not describe them. The name of a variable or parameter is a noun for its value. The counts cover packages, tests,
benchmarks and examples. `tests/prose_counts.json` stores the number of remaining occurrences of each kind.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORED_COUNTS = Path(__file__).with_name("prose_counts.json")

# Forbidden beginnings of docstrings, by the name of the rule.
BEGINNINGS = {
    "begins with What": re.compile(r"What\b"),
    "begins with Whether": re.compile(r"Whether\b"),
    "begins with Of": re.compile(r"Of\b"),
    "begins with Those": re.compile(r"Those\b"),
    "begins with The same": re.compile(r"The same\b"),
}
# Forbidden words in docstrings and comments, by the name of the rule.
WORDS = {
    "people for objects": re.compile(r"\b(nobody|somebody|who|whom|whoever)\b"),
    "objects that ask": re.compile(r"\b(ask|asks|asked|asking)\b"),
    "objects that tell": re.compile(r"\b(tell|tells|told|telling)\b"),
    "objects that want": re.compile(r"\b(want|wants|wanted|wanting)\b"),
    "numbers without a name": re.compile(r"\b(so|as) many\b"),
    "anew": re.compile(r"\banew\b"),
    "in the place of": re.compile(r"\bin the place of\b"),
}
# Names of variables and parameters that are not nouns.
NO_NOUNS = {
    *("asked", "came", "found", "given", "gone", "had", "instead", "kept", "known", "made", "seen", "there", "told"),
    *("want", "wanted", "what"),
}
NAME_RULE = "values without a noun"
RULES = (*BEGINNINGS, *WORDS, NAME_RULE)
Place = tuple[str, int, str]  # rule, line, text


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, including those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def values(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each variable that is assigned, and of each parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def places(source: str) -> Iterator[Place]:
    """Yields every occurrence of a forbidden phrase or name in a source."""
    tree = ast.parse(source)
    texts = list(docstrings(tree))
    for line, text in texts:
        for rule, pattern in BEGINNINGS.items():
            if pattern.match(text):
                yield rule, line, text.splitlines()[0]
    for line, text in (*texts, *comments(source)):
        for rule, pattern in WORDS.items():
            for match in pattern.finditer(text):
                yield rule, line, text[max(match.start() - 30, 0) : match.end() + 30].replace("\n", " ")
    for line, name in values(tree):
        if name.strip("_") in NO_NOUNS:
            yield NAME_RULE, line, name


def sources() -> Iterator[tuple[str, Path]]:
    """Yields Python files, each with the name of the package or folder under which its occurrences are counted."""
    for package in sorted(path for path in (ROOT / "packages").iterdir() if path.is_dir()):
        yield from ((package.name, path) for path in sorted((package / "src").glob("**/*.py")))
    for path in sorted([*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "conftest.py"]):
        yield "tests", path
    for folder in ("benchmarks", "examples"):
        yield from ((folder, path) for path in sorted((ROOT / folder).glob("**/*.py")))


@cache
def counts() -> dict[str, dict[str, int]]:
    """Returns the number of occurrences by package or folder, and by rule."""
    counters: dict[str, Counter[str]] = {}
    for name, path in sources():
        counters.setdefault(name, Counter()).update(rule for rule, *_ in places(path.read_text(encoding="utf-8")))
    return {name: {rule: counter[rule] for rule in RULES} for name, counter in counters.items()}


def main() -> None:
    if "--write" in sys.argv:
        STORED_COUNTS.write_text(json.dumps(counts(), indent=2) + "\n", encoding="utf-8")
        return
    for _, path in sources():
        for rule, line, text in places(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}:{line}: {rule}: {text}")


if __name__ == "__main__":
    main()
