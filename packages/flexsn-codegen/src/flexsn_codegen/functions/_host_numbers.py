"""Python numbers among the arguments of a function. Computations with these numbers run on the host at every call.

While the function is traced, each number is a `HostFloat` or a `HostInt`, which records the expressions that Python
computes from the number. Torch's operators receive a plain number instead. The function is traced twice, the second
time with different numbers. If a constant of the graph differs between the two traces, it has to be the value of an
expression. If no recorded expression has this value, the trace is valid for the current numbers only. A kernel takes
the values of the expressions as arguments. Python computes these values in float64, as the function itself does.
"""

from __future__ import annotations

import contextlib
import math
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexsn_graph import Converted

Number = int | float
Expression = tuple[Any, ...]
"""``("argument", i)``, ``("constant", value)``, or ``(name of a function, *expressions)``."""

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, "neg", "pos", "invert")},
    "abs": abs,
    "min": min,
    "max": max,
    "float": float,
    "reciprocal": lambda x: 1.0 / x,
}
# Functions whose results may decide a branch. Each result is a condition on the numbers.
_DECIDING: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "eq", "ne", "gt", "ge")},
    "bool": bool,
    "int": int,
    "index": operator.index,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "value": lambda x: x,
}
_MATH = (
    *("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "sin", "cos", "tan", "tanh", "sinh", "cosh"),
    *("atan", "asin", "acos", "erf", "erfc", "fabs", "cbrt", "exp2"),
)
_MATH_FUNCTIONS: dict[str, Callable[..., Any]] = {f"math.{name}": getattr(math, name) for name in _MATH}
_FUNCTIONS = {**_ARITHMETIC, **_DECIDING, **_MATH_FUNCTIONS}


def evaluate(expression: Expression, numbers: Sequence[Number]) -> Any:
    """The value of an expression if its arguments are these numbers."""
    kind = expression[0]
    if kind == "argument":
        return numbers[expression[1]]
    if kind == "constant":
        return expression[1]
    if kind == "rounded":
        value = evaluate(expression[1], numbers)
        return _round(value, expression[2])
    return _FUNCTIONS[kind](*[evaluate(part, numbers) for part in expression[1:]])


def same(a: object, b: object) -> bool:
    """True if two numbers are identical: NaN equals itself, 0.0 differs from -0.0, and 1 differs from 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


@dataclass(slots=True)
class Notes:
    """Expressions and decisions that a function computes from its numbers.

    Attributes:
        numbers: values of the numbers while the function is traced.
        decided: the outcomes of an earlier trace, which this trace repeats. `None` if this trace is the first one.
        expressions: each expression that is computed from the numbers, with its value.
        conditions: every decision that depends on the numbers, with its outcome, in order.
    """

    numbers: Sequence[Number]
    decided: dict[Expression, Any] | None = None
    expressions: dict[Expression, Any] = field(default_factory=dict)
    conditions: dict[Expression, Any] = field(default_factory=dict)

    def arguments(self) -> list[Any]:
        """The numbers as recording objects, for one run of the function."""
        return [self.note(("argument", i), number) for i, number in enumerate(self.numbers)]

    def note(self, expression: Expression, value: Any) -> Any:
        """Records a value that the function has computed. Returns it as a recording object if it is a number."""
        if type(value) not in (int, float):
            return value
        self.expressions[expression] = value
        return (HostInt if type(value) is int else HostFloat)(self, expression, value)

    def apply(self, name: str, *operands: Any) -> Any:
        """Computes a function of numbers and records the result, as a condition if the result may decide a branch."""
        if not all(isinstance(o, HostInt | HostFloat | int | float) for o in operands):
            return NotImplemented
        expressions = tuple(_get_expression(o) for o in operands)
        values = [plain(o) for o in operands]
        expression = (name, *expressions)
        if name in _DECIDING:
            decided_outcome = None if self.decided is None else self.decided.get(expression)
            outcome = _FUNCTIONS[name](*values) if decided_outcome is None else decided_outcome
            self.conditions[expression] = outcome
            return outcome
        return self.note(expression, _FUNCTIONS[name](*values))


def plain(value: Any) -> Any:
    """Converts a recorded number to a plain Python number."""
    return value.value if isinstance(value, HostInt | HostFloat) else value


def _get_expression(value: Any) -> Expression:
    return value.expression if isinstance(value, HostInt | HostFloat) else ("constant", value)


class _Noted:
    notes: Notes
    expression: Expression
    value: Any

    def __init__(self, notes: Notes, expression: Expression, value: Any) -> None:
        self.notes, self.expression, self.value = notes, expression, value

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, specification: str) -> str:
        return format(self.value, specification)

    def __hash__(self) -> int:
        return hash(self.notes.apply("value", self))

    def __float__(self) -> float:
        # Code that reads the number as a float may branch on the value, so the trace is valid for this value only.
        return float(self.notes.apply("value", self))

    def __int__(self) -> int:
        return int(self.notes.apply("int", self))

    def __round__(self, digits: int | None = None) -> Any:
        return self.notes.apply("round", self) if digits is None else self.notes.apply("round", self, digits)

    def is_integer(self) -> bool:
        return bool(float(self).is_integer())


# Subclasses of torch's symbolic numbers, so that torch's operators accept the objects as numbers. The methods for
# arithmetic, comparisons and conversions are overridden.
class HostFloat(_Noted, torch.SymFloat):  # type: ignore[misc]
    """A float that records all computations with it."""


class HostInt(_Noted, torch.SymInt):
    """An int that records all computations with it."""

    def __index__(self) -> int:
        return int(self.notes.apply("index", self))


def _install() -> None:
    def unary(name: str) -> Callable[[Any], Any]:
        return lambda self: self.notes.apply(name, self)

    def binary(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: self.notes.apply(name, self, other)

    def reflected(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: self.notes.apply(name, other, self)

    for cls in (HostFloat, HostInt):
        for name in _BINARY:
            dunder = name.rstrip("_")
            setattr(cls, f"__{dunder}__", binary(name))
            setattr(cls, f"__r{dunder}__", reflected(name))
        for name in ("lt", "le", "eq", "ne", "gt", "ge"):
            setattr(cls, f"__{name}__", binary(name))
        for name in ("neg", "pos", "invert", "abs", "bool", "floor", "ceil", "trunc"):
            setattr(cls, f"__{name}__", unary(name))
        # torch.sym_float, sym_max, sym_min, sym_sqrt and similar functions call the following methods.
        setattr(cls, "__sym_float__", unary("float"))  # noqa: B010
        setattr(cls, "__sym_max__", binary("max"))  # noqa: B010
        setattr(cls, "__sym_min__", binary("min"))  # noqa: B010
        for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2"):
            setattr(cls, f"__sym_{name}__", unary(f"math.{name}"))


_install()


_patched = threading.RLock()


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Context in which the functions of `math` record their results, and torch's operators receive plain numbers."""

    def record(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*operands: Any) -> Any:
            for operand in operands:
                if isinstance(operand, _Noted):
                    return operand.notes.apply(name, *operands)
            return original(*operands)

        return function

    with _patched:
        for name in _MATH:
            setattr(math, name, record(f"math.{name}", _MATH_FUNCTIONS[f"math.{name}"]))
        try:
            with Converted(plain):
                yield
        finally:
            for name in _MATH:
                setattr(math, name, _MATH_FUNCTIONS[f"math.{name}"])


def change_numbers(numbers: Sequence[Number], changed: Sequence[int]) -> list[Number]:
    """Numbers for a second trace. The numbers at the positions `changed` have other values, but the same signs."""
    results = list(numbers)
    for count, i in enumerate(changed):
        number = numbers[i]
        if isinstance(number, int):
            results[i] = number + (3 + 2 * count) * (-1 if number < 0 else 1)
        elif number == 0.0 or not math.isfinite(number):
            results[i] = math.copysign(0.37109375 + count / 7, number)
        elif abs(number) < 1:  # the new number is also below 1, because the number may be a probability
            distance = (1 - abs(number)) * (0.37109375 + 0.5 * count / len(numbers))
            results[i] = math.copysign(abs(number) + distance, number)
        else:
            results[i] = number * (1.7182818284590452 + count / 7)
    return results


class Unmatched(Exception):
    """Raised if it is unknown how a constant of a graph depends on the numbers."""


def match(
    first: Notes, second: Notes, values: Sequence[Number], other: Sequence[Number], changed: Sequence[int]
) -> list[Expression]:
    """The expression that computes each constant of a graph.

    Args:
        values: the constants in the trace of `first`.
        other: the constants in the trace of `second`.
        changed: positions of the numbers that differ in the second trace.

    Raises:
        Unmatched: a constant changes but is not the value of an expression, or does not change but may be the value of
            an expression.
    """
    by_values: dict[tuple[Any, Any], Expression] = {}
    for expression, value in first.expressions.items():
        counterpart = second.expressions.get(expression)
        if counterpart is None or _list_arguments(expression).isdisjoint(changed):
            continue
        for variant, a, b in _list_variants(expression, value, counterpart):
            by_values.setdefault((_make_key(a), _make_key(b)), variant)
    matches = []
    for a, b in zip(values, other, strict=True):
        entry = by_values.get((_make_key(a), _make_key(b)))
        # A number that is equal in both traces may be a constant, or the value of an expression whose values are equal.
        if same(a, b) == (entry is not None):
            raise Unmatched
        matches.append(("constant", a) if entry is None else entry)
    return matches


def _list_arguments(expression: Expression) -> set[int]:
    if expression[0] == "argument":
        return {expression[1]}
    return set[int]().union(*(_list_arguments(part) for part in expression[1:] if isinstance(part, tuple)))


def _list_variants(expression: Expression, a: Number, b: Number) -> Iterator[tuple[Expression, Any, Any]]:
    """The expression, and the values that operators may compute from the expression before a kernel receives them."""
    for name in (None, "neg", "reciprocal"):
        variant: Expression = expression if name is None else (name, expression)
        try:
            x, y = (v if name is None else _FUNCTIONS[name](v) for v in (a, b))
        except ArithmeticError:
            continue
        yield variant, x, y
        if not isinstance(x, float):
            yield ("float", variant), _convert_to_float(x), _convert_to_float(y)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield ("rounded", variant, dtype), _round(x, dtype), _round(y, dtype)


def _convert_to_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _round(value: Number, dtype: torch.dtype) -> float:
    """Rounds a number to a dtype as torch does: first to float32, and then to the dtype."""
    number = _convert_through("f", _convert_to_float(value))
    if dtype == torch.float16:
        return _convert_through("e", number)
    if dtype == torch.bfloat16 and math.isfinite(number):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (number,) = struct.unpack("<f", struct.pack("<I", bits))
    return number


def _convert_through(layout: str, value: float) -> float:
    try:
        number: float = struct.unpack(f"<{layout}", struct.pack(f"<{layout}", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return number


def _make_key(value: Number) -> tuple[type, Any]:
    return (float, struct.pack("<d", value)) if isinstance(value, float) else (type(value), value)
