"""Each class name belongs to one class, so that a search for the name finds one concept. Exceptions are listed with
their reasons.
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

_SAME_FILE = "the packages graph and hop contain copies of one file, because neither may import the other"
_SAME_IDEA = "an error of traces in graph and the same error of scans in hop, because neither may import the other"
_PUBLIC = "public names of two packages that do not use each other"
_ROWS = "the rows of a step that one program processes, and the rows of memory that steps write"

SEVERAL_OWNERS: Mapping[str, str] = {
    "Absorbed": "a class of steps, and a public class of reports",
    "Call": "a public class of transforms, and a call of many functions at once",
    "Choice": "the choice of a backend for a neuron, and the choice of segments for a scan",
    "Columns": "the columns of a value in one step, and the columns of the map of a segment",
    "Converted": _PUBLIC,
    "CoreArityError": _SAME_IDEA,
    "Elements": "positions of elements in a step on pieces, and the elements of a batch that draw numbers",
    "ExampleError": _PUBLIC,
    "Launch": "a launch of a function without time, and the launch of a scan, whose protocol has the same name",
    "Missing": _SAME_FILE,
    "Moved": "a step of a plan, and a line of a conversion's report",
    "MutationError": _SAME_IDEA,
    "Numbers": "an argument of functions that draw, and a neuron's key for its random numbers",
    "OverTime": "a public layer of nn, and a step's values over time in runtime",
    "Places": "places of values that a trace has read, and places of random numbers",
    "Plan": "the plan of a call without time, and the plan of a scan, neither of which uses the other",
    "RandomOpError": _SAME_IDEA,
    "Rows": _ROWS,
    "Step": "a step of a call of many functions, and a step that draws random numbers",
    "Summed": "a step in each of the two classes named Plan",
    "UnsupportedVersionError": _SAME_FILE,
    "UnsupportedVersionWarning": _SAME_FILE,
    "_Builder": "the builder of a step's graph, and the builder of a NIR graph",
    "_Carried": "values that pass from segment to segment, and values that a compiled loop carries",
    "_Reader": "a reader of a network's graph for NIR, and a reader that finds spikes in the graph",
    "_Tracer": "a tracer of a network for NIR, and a tracer of its dataflow",
}


def list_places(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the places of each class name that is defined in several places."""
    classes: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    return {name: places for name, places in classes.items() if len(places) > 1}


@functools.cache
def list_duplicates() -> dict[str, list[str]]:
    return list_places({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES})


def test_class_names_are_unique() -> None:
    duplicates = list_duplicates()
    unlisted = {name: places for name, places in duplicates.items() if name not in SEVERAL_OWNERS}
    assert not unlisted, "rename one of the classes, or list the name with the reason"
    assert not SEVERAL_OWNERS.keys() - duplicates.keys(), "only one class has this name: remove it from the list"


def test_duplicated_files_are_equal() -> None:
    names = [name for name, reason in SEVERAL_OWNERS.items() if reason == _SAME_FILE]
    files = {place.rpartition("/")[2].partition(":")[0] for name in names for place in list_duplicates()[name]}
    assert files == {"versions.py"}
    for name in names:
        assert len(list_duplicates()[name]) == 2


@pytest.mark.parametrize("second", ["class A: ...", "def f():\n    class A: ..."])
def test_second_class_of_a_name_is_found(second: str) -> None:
    assert list_places({"x.py": "class A: ...", "y.py": second}) == {
        "A": ["x.py:1", f"y.py:{1 + second.count(chr(10))}"]
    }
    assert list_places({"x.py": "class A: ...", "y.py": "class B: ..."}) == {}
