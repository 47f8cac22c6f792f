"""The rules of a target's ops as a table to which rows are added."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexsn_codegen.source._dtypes import HALF_DTYPES, register_dtype
from flexsn_codegen.targets._base import Op, OpCall, Rule

_prims = torch.ops.prims


class RuleTable(dict[Op, Rule]):
    """Rules by op. The rules of `nextafter` and `frexp` are the same for all targets.

    Args:
        functions: the prefix of the names of functions that sources call.
        name_of: maps a dtype to its name in sources.
    """

    def __init__(self, functions: str, name_of: Callable[[torch.dtype], str]) -> None:
        super().__init__()
        self._functions, self._name_of = functions, name_of
        self[_prims.nextafter.default] = self._nextafter
        self[_prims.frexp.default] = self._frexp

    def rule(self, op: Op) -> Callable[[Rule], Rule]:
        """Registers the rule of an op that has a row of facts."""

        def decorate(rule: Rule) -> Rule:
            self[op] = rule
            return rule

        return decorate

    def row(self, name: str, floats: str | None, ints: str | None = None, bools: str | None = None) -> None:
        """Adds the rule of a prim, with a template for floats, one for integers and one for bools.

        If a template is `None`, the rule rejects the dtypes of this template.

        In a template, `{0}` is the first operand, and `{t}` is the type of the operands.
        """

        def rule(call: OpCall) -> str:
            template = bools if call.is_bool else floats if call.is_float else ints
            if template is None:
                raise call.refuse("not supported. Convert to a floating-point dtype first.")
            return template.format(*call.operands, t=self.type_of(call.dtype))

        self[getattr(_prims, name).default] = rule

    def type_of(self, dtype: torch.dtype) -> str:
        """The type of values of `dtype` in registers."""
        return self._name_of(register_dtype(dtype))

    def _nextafter(self, call: OpCall) -> str:
        if not call.is_float:
            raise call.refuse("only floating-point numbers have neighbours.")
        half = f"_{str(call.dtype).removeprefix('torch.')}" if call.dtype in HALF_DTYPES else ""
        return f"{self._functions}nextafter{half}({', '.join(call.operands)})"

    def _frexp(self, call: OpCall) -> str:
        return f"{self._functions}{('frexp_mantissa', 'frexp_exponent')[call.index]}({call.operands[0]})"
