"""Each class name belongs to one class, so that a search for the name finds one concept. Exceptions are listed with
reasons.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

_SAME_FILE = "graph and hop have the same file, and neither may need the other"
_SAME_IDEA = "one mistake, of a trace in graph and of a scan in hop, neither of which may need the other"
_PUBLIC = "both are public names of packages that do not meet"
_ROWS = "rows of a step that one program walks, and rows of memory that steps write"

SEVERAL_OWNERS: Mapping[str, str] = {
    "Absorbed": "of a step, and of a report that is a public name",
    "Call": "a public name of transforms, and a call of many functions at once",
    "Choice": "of a backend by a neuron, and of segments for a scan",
    "Columns": "of a value of one step, and of the map of a segment",
    "Converted": _PUBLIC,
    "CoreArityError": _SAME_IDEA,
    "Elements": "where elements of a step on pieces are, and which elements of a batch draw",
    "ExampleError": _PUBLIC,
    "Launch": "a launch of a function without time, and one of a scan, whose protocol has the same name",
    "Missing": _SAME_FILE,
    "Moved": "a step of a plan, and a line of a conversion's report",
    "MutationError": _SAME_IDEA,
    "Numbers": "an argument of functions that draw, and a neuron's key of its random numbers",
    "OverTime": "a public layer of nn, and a step's values over time in runtime",
    "Places": "of what a trace read, and of random numbers",
    "Plan": "of a call of a function without time, and of a scan; neither knows the other",
    "RandomOpError": _SAME_IDEA,
    "Rows": _ROWS,
    "Step": "of a call of many functions, and of one of random numbers",
    "Summed": "a step of either plan",
    "UnsupportedVersionError": _SAME_FILE,
    "UnsupportedVersionWarning": _SAME_FILE,
    "_Builder": "of a step's graph, and of a NIR graph",
    "_Carried": "values that a segment hands on, and those of a compiled loop",
    "_Known": "what a trace knows of a call, and a scan of a backward",
    "_Reader": "of a network's graph for NIR, and for its spikes",
    "_Tracer": "of a network for NIR, and for its dataflow",
}


def owners(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the classes that are defined in several places: for each name, the places."""
    classes: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    return {name: places for name, places in classes.items() if len(places) > 1}


@functools.cache
def duplicated_names() -> dict[str, list[str]]:
    return owners({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES})


def test_class_names_are_unique() -> None:
    duplicates = duplicated_names()
    unlisted = {name: places for name, places in duplicates.items() if name not in SEVERAL_OWNERS}
    assert not unlisted, "give one of each another name, or list it with the reason"
    assert not SEVERAL_OWNERS.keys() - duplicates.keys(), "these have one owner: take them off the list"


def test_duplicated_files_are_equal() -> None:
    twice = [name for name, reason in SEVERAL_OWNERS.items() if reason == _SAME_FILE]
    files = {place.rpartition("/")[2].partition(":")[0] for name in twice for place in duplicated_names()[name]}
    assert files == {"versions.py"}
    for name in twice:
        assert len(duplicated_names()[name]) == 2


@pytest.mark.parametrize("second", ["class A: ...", "def f():\n    class A: ..."])
def test_second_class_of_a_name_is_found(second: str) -> None:
    assert owners({"x.py": "class A: ...", "y.py": second}) == {"A": ["x.py:1", f"y.py:{1 + second.count(chr(10))}"]}
    assert owners({"x.py": "class A: ...", "y.py": "class B: ..."}) == {}
