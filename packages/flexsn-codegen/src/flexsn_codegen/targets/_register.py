"""Registration of ops. An op has one row of facts, and one rule for each target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flexsn_codegen.targets import Rule, Target
from flexsn_codegen.targets._base import Op
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import OpFacts, facts_of, register_facts


def register_op(
    overload: Op, *, exact: bool | None = None, facts: OpFacts | None = None, target: Target = TRITON
) -> Callable[[Rule], Rule]:
    """Adds or replaces the rule of an op, so that the op is not decomposed.

    Args:
        overload: the op, for example ``torch.ops.mylib.spike.default``. It must work element by element.
        exact: True if a float16 or bfloat16 result needs no rounding, because the result is the value of an operand.
            By default, the flag in `facts`.
        facts: all other facts about the op, for all targets. By default, the facts that are already registered.
        target: the target to which the rule applies.

    Returns:
        A decorator for the rule, which is a function from `OpCall` to an expression in the target's language. Half
        operands and results are float32 in this expression.

    Example:
        >>> @register_op(torch.ops.aten.celu.default)
        ... def celu(call):
        ...     (x,) = call.operands
        ...     return f"tl.where({x} > 0, {x}, dev.expm1({x}))"
    """

    def decorate(rule: Rule) -> Rule:
        registered = facts or facts_of(overload) or OpFacts()
        register_facts(overload, registered if exact is None else replace(registered, exact=exact))
        target.rules[overload] = rule
        return rule

    return decorate


def supported_ops(target: Target = TRITON) -> tuple[Op, ...]:
    """The ops that have a rule, sorted by name."""
    return tuple(sorted(target.rules, key=str))
