"""Traces a function so that one trace is valid for all numbers that lead to equal traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flexsn_codegen.errors import TraceError, UnsupportedOpError
from flexsn_codegen.functions._host_numbers import Expression, Notes, Unmatched, change_numbers, evaluate, match, same
from flexsn_codegen.source._source import CoreSource

T = TypeVar("T")
Conditions = Sequence[tuple[Expression, Any]]


def follow(
    trace: Callable[[Notes], tuple[T, list[CoreSource], object]], numbers: Sequence[Any], fixed: Sequence[int] = ()
) -> tuple[T, list[CoreSource], Conditions, list[list[Expression]]]:
    """Traces a function. Returns the trace, its sources, its conditions, and expressions for the sources' numbers.

    Args:
        trace: traces the function with the given numbers. Returns the trace, the sources of its kernels, and a value
            that has to be equal in traces with other numbers.
        numbers: the numbers of a call.
        fixed: positions of numbers whose current values the trace requires.
    """
    notes = Notes(numbers)
    traced, sources, structure = trace(notes)
    values = [number.value for source in sources for number in source.numbers]

    def split(slots: Sequence[Expression]) -> list[list[Expression]]:
        rest = iter(slots)
        return [[next(rest) for _ in source.numbers] for source in sources]

    def slots(changed: Sequence[int]) -> list[Expression] | None:
        """The expressions for the kernels' numbers. `None` if the trace is invalid for other numbers at `changed`."""
        if not changed:
            return [("constant", value) for value in values]
        second = Notes(change_numbers(numbers, changed), notes.conditions)
        try:
            _, second_sources, second_structure = trace(second)
            if [s.name for s in second_sources] != [s.name for s in sources] or second_structure != structure:
                return None
            second_values = [number.value for source in second_sources for number in source.numbers]
            return match(notes, second, values, second_values, changed)
        except (Unmatched, ArithmeticError, ValueError, UnsupportedOpError, TraceError):
            return None

    if not numbers:
        return traced, sources, (), split([])
    free = [i for i in range(len(numbers)) if i not in fixed]
    expressions = slots(free)
    if expressions is None:
        free = [i for i in free if slots([i]) is not None] if len(free) > 1 else []
        expressions = slots(free)
        if expressions is None:
            free, expressions = [], slots([])
    assert expressions is not None
    conditions = dict(notes.conditions)
    conditions |= {("value", ("argument", i)): number for i, number in enumerate(numbers) if i not in free}
    return traced, sources, list(conditions.items()), split(expressions)


def hold(conditions: Conditions, numbers: Sequence[Any]) -> bool:
    """True if all conditions have the same outcomes for these numbers, so that the trace is valid for them."""
    try:
        return all(same(evaluate(expression, numbers), outcome) for expression, outcome in conditions)
    except ArithmeticError:
        return False  # the function itself raises this error when it runs


def integers(source: CoreSource, slots: Sequence[Expression], numbers: Sequence[Any]) -> list[int]:
    """The integer arguments of a kernel, in order, that represent its numbers."""
    pairs = zip(source.numbers, slots, strict=True)
    return [integer for number, slot in pairs for integer in number.integers_of(evaluate(slot, numbers))]
