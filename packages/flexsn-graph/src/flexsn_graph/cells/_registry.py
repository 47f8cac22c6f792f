"""Which function says what an op does to dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Of `rule(work, node, *arguments)`: what it returns is the value of a call of one of `ops`."""

    def decorate(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return decorate
