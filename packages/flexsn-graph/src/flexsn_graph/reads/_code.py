"""Finds the names in the byte code of a function, except for the names of local variables and closure variables."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType


@dataclass(frozen=True, slots=True)
class Names:
    """Names that one code object uses. Names in functions that are defined inside the code are not included.

    Attributes:
        variables: global variables and builtins that the code reads.
        attributes: all names after a dot, names that the code imports from modules, and variables that it sets.
        imports: modules, as `(level, name)`. The level is the number of leading dots.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[tuple[int, str], ...]


@lru_cache(4096)
def names_of(code: CodeType) -> Names:
    """The names that a code object uses."""
    variables: dict[str, None] = {}
    attributes: set[str] = set()
    imports: list[tuple[int, str]] = []
    previous: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            variables[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            level = previous[-2].argval if len(previous) > 1 else 0
            imports.append((level if isinstance(level, int) else 0, instruction.argval))
        elif instruction.opcode in dis.hasname:
            attributes.add(instruction.argval)
        previous = [*previous[-1:], instruction]
    return Names(tuple(variables), frozenset(attributes), tuple(imports))


def nested(code: CodeType) -> list[CodeType]:
    """The code of all functions defined inside a function, at any depth."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*inner, *(deeper for function_code in inner for deeper in nested(function_code))]
