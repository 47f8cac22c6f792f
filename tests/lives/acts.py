"""Register of acts. An act is something that a user does with a network. Strategies of Hypothesis draw the arguments
of an act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lives.life import Life

Perform = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Act:
    """One action of a user.

    Attributes:
        perform: function that is called as `perform(life, **arguments)`. It returns all visible results of the act.
        arguments: strategies for the arguments, which are plain values.
        weight: frequency relative to other acts.
        when: function that returns True for lives in which the act has an effect.
        wrapper: name of the argument that chooses a wrapper that changes no results; `None` if there is none. The loop
            runs without the wrapper.
    """

    name: str
    perform: Perform
    arguments: dict[str, st.SearchStrategy[Any]]
    weight: int = 1
    wrapper: str | None = None
    when: Callable[[Life], bool] = lambda life: True


ACTS: dict[str, Act] = {}


def act(
    weight: int = 1,
    wrapper: str | None = None,
    when: Callable[[Life], bool] = lambda life: True,
    **arguments: st.SearchStrategy[Any],
) -> Callable[[Perform], Perform]:
    """Registers a function as an act, under its name."""

    def register(perform: Perform) -> Perform:
        name = perform.__name__
        ACTS[name] = Act(name, perform, arguments, weight, wrapper, when)
        return perform

    return register


# Strategies for the arguments that many acts have.
which = st.integers(0, 7)
seed = st.integers(0, 5)
yes_or_no = st.booleans()


def perform(name: str, life: Life, arguments: dict[str, Any]) -> dict[str, Any]:
    """Performs an act of the register. The loop runs without the wrapper of the act, which changes no results."""
    entry = ACTS[name]
    if entry.wrapper is not None and not life.compiled:
        arguments = {**arguments, entry.wrapper: None}
    return entry.perform(life, **arguments)
