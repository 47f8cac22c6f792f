"""Traces a function so that one trace serves all numbers that it would be traced alike for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flexsn_codegen.errors import TraceError, UnsupportedOpError
from flexsn_codegen.functions._host_numbers import Expression, Notes, Unmatched, evaluate, match, others, same
from flexsn_codegen.source._source import CoreSource

T = TypeVar("T")
Conditions = Sequence[tuple[Expression, Any]]


def follow(
    trace: Callable[[Notes], tuple[T, list[CoreSource], object]], numbers: Sequence[Any], fixed: Sequence[int] = ()
) -> tuple[T, list[CoreSource], Conditions, list[list[Expression]]]:
    """A trace, its sources, the conditions on numbers that it is for, and the expressions of each source's numbers.

    Args:
        trace: gives a trace, the sources of its kernels, and what else has to be the same for other numbers.
        numbers: those of a call.
        fixed: places of numbers that the trace is for alone.
    """
    notes = Notes(numbers)
    traced, sources, structure = trace(notes)
    values = [number.value for source in sources for number in source.numbers]

    def apart(slots: Sequence[Expression]) -> list[list[Expression]]:
        rest = iter(slots)
        return [[next(rest) for _ in source.numbers] for source in sources]

    def slots(changed: Sequence[int]) -> list[Expression] | None:
        """Expressions of the kernels' numbers, if the trace serves other numbers in these places; else `None`."""
        if not changed:
            return [("constant", value) for value in values]
        second = Notes(others(numbers, changed), notes.conditions)
        try:
            _, found, also = trace(second)
            if [s.name for s in found] != [s.name for s in sources] or also != structure:
                return None
            there = [number.value for source in found for number in source.numbers]
            return match(notes, second, values, there, changed)
        except (Unmatched, ArithmeticError, ValueError, UnsupportedOpError, TraceError):
            return None

    if not numbers:
        return traced, sources, (), apart([])
    free = [i for i in range(len(numbers)) if i not in fixed]
    found = slots(free)
    if found is None:
        free = [i for i in free if slots([i]) is not None] if len(free) > 1 else []
        found = slots(free)
        if found is None:
            free, found = [], slots([])
    assert found is not None
    conditions = dict(notes.conditions)
    conditions |= {("value", ("argument", i)): number for i, number in enumerate(numbers) if i not in free}
    return traced, sources, list(conditions.items()), apart(found)


def hold(conditions: Conditions, numbers: Sequence[Any]) -> bool:
    """True if a call with these numbers would be traced alike."""
    try:
        return all(same(evaluate(expression, numbers), outcome) for expression, outcome in conditions)
    except ArithmeticError:
        return False  # the function itself will raise it


def integers(source: CoreSource, slots: Sequence[Expression], numbers: Sequence[Any]) -> list[int]:
    """The integer arguments of a kernel for its numbers, in order."""
    pairs = zip(source.numbers, slots, strict=True)
    return [integer for number, slot in pairs for integer in number.integers_of(evaluate(slot, numbers))]
