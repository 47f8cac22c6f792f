"""One fast check that all values read by a core are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from flexsn_graph.reads._places import Place


class Guard:
    """A check of all places, as one generated Python function. The check takes about 20 ns per place.

    Args:
        values: the values that were read, by place.

    Attributes:
        watches: True if any place is checked.
        holds: the check. It compares most objects by identity, so it may return False although all objects are equal to
            those that were read. If the check returns False, `changed` finds the values that really differ.
    """

    def __init__(self, values: Mapping[Place, Any]) -> None:
        self._values = dict(values)
        self._names: dict[int, str] = {}
        # Closure variables are the fastest variables to read. Checks of similar neurons also share one code object.
        self._cells: dict[str, CellType] = {}
        self._tokens: dict[Place, str] = {}
        conditions = []
        for i, (place, value) in enumerate(self._values.items()):
            token = self._tokens[place] = f"v{i}"
            condition = place.condition(value, token, self._bind)
            if condition is not None:
                self._cells[token] = CellType(place.token(value))
                conditions.append(condition)
        self.watches = bool(conditions)
        code = _compile("\n        and ".join(conditions) or "True", tuple(self._cells))
        closure = tuple(self._cells[name] for name in code.co_freevars)
        self.holds: Callable[[], bool] = FunctionType(code, {}, closure=closure)

    def changed(self) -> dict[Place, Any]:
        """Returns the current value of each place whose value differs from the recorded value."""
        results = {}
        for place, before in self._values.items():
            current = place.read()
            if current is before:
                continue
            if place.same(current, before):
                self.expect(place, current)
            else:
                results[place] = current
        return results

    def expect(self, place: Place, value: Any) -> None:
        """Makes `value` the expected value of a place from now on."""
        self._values[place] = value
        cell = self._cells.get(self._tokens[place])
        if cell is not None:
            cell.cell_contents = place.token(value)

    def _bind(self, value: Any) -> str:
        name = self._names.setdefault(id(value), f"o{len(self._names)}")
        self._cells[name] = CellType(value)
        return name


@lru_cache(1024)
def _compile(conditions: str, variables: tuple[str, ...]) -> CodeType:
    source = f"""
def make({", ".join(variables)}):
    def holds():
        try:
            if (
            {conditions}
            ):
                return True
        except Exception:
            return False
        return False
    return holds
"""
    defined: dict[str, Any] = {}
    exec(compile(source, "<flexsn_graph.reads>", "exec"), defined)
    code: CodeType = defined["make"](*variables).__code__
    return code
