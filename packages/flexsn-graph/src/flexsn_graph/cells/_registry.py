"""The registry of rules that define how ops act on dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for `ops`: `rule(cell_pass, node, *arguments)` returns the value of a call of such an op."""

    def decorate(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return decorate
