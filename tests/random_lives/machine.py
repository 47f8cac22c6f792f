"""Hypothesis' state machine of random lives, and runs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from random_lives.acts import ACTS, Act
from random_lives.networks import FAMILIES, NEURONS, Plan, layers_for
from random_lives.shrinking import shortest
from random_lives.twins import DifferenceError, Twins


@st.composite
def plans(draw: st.DrawFn, backends: tuple[tuple[str, str], ...], device: str) -> Plan:
    """Networks of two or three layers with a neuron among them at least.

    Args:
        backends: pairs of backend and launcher to choose from.
    """
    family = draw(st.sampled_from(list(FAMILIES)))
    known = layers_for(family)
    neurons = [name for name in known if name in NEURONS]
    layers = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
    layers.insert(draw(st.integers(0, len(layers))), draw(st.sampled_from(neurons)))
    if draw(st.booleans()):
        i = draw(st.integers(0, len(layers) - 1))
        layers[i] = f"+{layers[i]}"
    backend, launcher = draw(st.sampled_from(backends))
    return Plan(family, tuple(layers), backend, launcher, device)


def machine(
    backends: tuple[tuple[str, str], ...] = (("auto", "auto"),), device: str = "cpu"
) -> type[RuleBasedStateMachine]:
    """A state machine whose rules are the acts."""

    class RandomLives(RuleBasedStateMachine):
        twins: Twins

        @initialize(plan=plans(backends, device))
        def born(self, plan: Plan) -> None:
            self.twins = Twins(plan)

        def teardown(self) -> None:
            Twins.counts["lives"] += 1

    for found in ACTS.values():
        for i in range(found.weight):
            setattr(RandomLives, f"{found.name}_{i}", _rule(found, i))
    return RandomLives


def _rule(found: Act, number: int) -> Callable[..., Any]:
    def method(self: Any, **arguments: Any) -> None:
        self.twins.act(found.name, **arguments)

    method.__name__ = f"{found.name}_{number}"
    made: Callable[..., Any] = rule(**found.arguments)(method)
    return made


def run(lives: type[RuleBasedStateMachine], runs: int, rules: int, seed: int | None = None) -> None:
    """Runs lives of at most so many acts.

    Args:
        seed: of the lives; `None`: the same each time.

    Raises:
        DifferenceError: of the shortest program that was found.
    """
    if seed is not None:
        lives = hypothesis.seed(seed)(lives)
    try:
        _run(lives, runs, rules, derandomize=seed is None)
    except DifferenceError as error:
        raise shortest(error) from None


def _run(lives: type[RuleBasedStateMachine], runs: int, rules: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lives,
        settings=settings(
            max_examples=runs,
            stateful_step_count=rules,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a program is data, and `shorter` shrinks it in bounded time
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
