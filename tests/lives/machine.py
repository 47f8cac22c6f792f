"""A Hypothesis state machine for random lives, and functions that run it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lives.acts import ACTS, Act
from lives.networks import FAMILIES, LAYERS, WITH_STATE, Plan, layers_for
from lives.shrinking import shortest
from lives.twins import DifferenceError, Twins

Backends = tuple[tuple[str, str], ...]
# Layers and acts of a short run. They cover each kind of state and captured tensor, and need few compiled kernels.
FEW_LAYERS = ("lif learned", "two outputs", "delays", "sliding", "dropout", "linear", "norm", "conv norm")
LONG_ACTS = ("dtype", "forward_in_autocast")


@st.composite
def plans(draw: st.DrawFn, backends: Backends, device: str, names: Collection[str]) -> Plan:
    """Draws networks of two or three layers, at least one of which has a state.

    Args:
        backends: pairs of backend and launcher to choose from.
        names: layers to choose from.
    """
    able = [family for family in FAMILIES if {*layers_for(family)} & {*names} & {*WITH_STATE}]
    family = draw(st.sampled_from(able))
    supported = [name for name in layers_for(family) if name in names]
    known_with_state = [name for name in supported if name in WITH_STATE]
    layers = draw(st.lists(st.sampled_from(supported), min_size=1, max_size=2))
    layers.insert(draw(st.integers(0, len(layers))), draw(st.sampled_from(known_with_state)))
    if draw(st.booleans()):
        i = draw(st.integers(0, len(layers) - 1))
        layers[i] = f"+{layers[i]}"
    backend, launcher = draw(st.sampled_from(backends))
    return Plan(family, tuple(layers), backend, launcher, device)


def machine(
    backends: Backends = (("auto", "auto"),),
    device: str = "cpu",
    layers: Collection[str] = tuple(LAYERS),
    without: Collection[str] = (),
) -> type[RuleBasedStateMachine]:
    """Makes a state machine whose rules are the acts.

    Args:
        backends: backends of the compiled twins, each with a value of `FLEXSN_LAUNCHER`.
        layers: names of the layers that networks may contain.
        without: names of acts that are not performed.
    """

    class RandomLives(RuleBasedStateMachine):
        twins: Twins

        @initialize(plan=plans(backends, device, layers))
        def born(self, plan: Plan) -> None:
            self.twins = Twins(plan)

        def teardown(self) -> None:
            Twins.counts["lives"] += 1

    for entry in (entry for name, entry in ACTS.items() if name not in without):
        for i in range(entry.weight):
            setattr(RandomLives, f"{entry.name}_{i}", _rule(entry, i))
    return RandomLives


def _rule(entry: Act, number: int) -> Callable[..., Any]:
    def method(self: Any, **arguments: Any) -> None:
        self.twins.act(entry.name, **arguments)

    method.__name__ = f"{entry.name}_{number}"
    strategies: dict[str, Any] = entry.arguments
    decorate: Callable[[Any], Any] = rule(**strategies)
    made = decorate(method)
    when: Callable[[Any], Callable[..., Any]] = precondition(lambda self: entry.when(self.twins.loop))
    return when(made)


def run(lives: type[RuleBasedStateMachine], runs: int, rules: int, seed: int | None = None) -> None:
    """Runs random lives of at most `rules` acts each.

    Args:
        seed: seed of the lives; `None` if lives are equal in each run.

    Raises:
        DifferenceError: the error of the shortest program that was found.
    """
    if seed is not None:
        lives = hypothesis.seed(seed)(lives)
    try:
        _run(lives, runs, rules, derandomize=seed is None)
    except DifferenceError as error:
        raise shortest(error) from None


def _run(lives: type[RuleBasedStateMachine], runs: int, rules: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        lives,
        settings=settings(
            max_examples=runs,
            stateful_step_count=rules,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # without Phase.shrink, since `shortest` shrinks programs in bounded time
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
