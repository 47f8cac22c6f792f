"""A Hypothesis state machine for random lives, and functions that run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lives.acts import ACTS, Act
from lives.networks import FAMILIES, LAYERS, WITH_STATE, Plan, layers_for
from lives.shrinking import find_shortest
from lives.twins import DifferenceError, Twins

Backends = tuple[tuple[str, str], ...]
# Networks of short lives. Together, they have each kind of state and of captured tensor. There are only a few networks,
# so that the lives share traces and kernels.
FEW_PLANS = (
    ("vector", ("lif learned", "linear", "dropout")),
    ("vector", ("+two outputs", "delays")),
    ("vector", ("norm", "sliding", "+lif learned")),
    ("vector", ("linear", "rlif")),
    ("image", ("conv norm", "lif learned")),
)
# Bit masks of the results in the losses of short lives: all results, the first, and all except the first. Each subset
# needs another backward.
FEW_SUBSETS = {"some": st.sampled_from([63, 1, 62])}
# Acts that short lives leave out.
LONG_ACTS = ("dtype", "forward_in_autocast")


@st.composite
def plans(draw: st.DrawFn, backends: Backends, device: str, names: Collection[str]) -> Plan:
    """Draws networks of two or three layers, at least one of which has a state.

    Args:
        backends: pairs of backend and launcher to choose from.
        names: layers to choose from.
    """
    families = [family for family in FAMILIES if {*layers_for(family)} & {*names} & {*WITH_STATE}]
    family = draw(st.sampled_from(families))
    supported = [name for name in layers_for(family) if name in names]
    with_state = [name for name in supported if name in WITH_STATE]
    layers = draw(st.lists(st.sampled_from(supported), min_size=1, max_size=2))
    layers.insert(draw(st.integers(0, len(layers))), draw(st.sampled_from(with_state)))
    if draw(st.booleans()):
        i = draw(st.integers(0, len(layers) - 1))
        layers[i] = f"+{layers[i]}"
    backend, launcher = draw(st.sampled_from(backends))
    return Plan(family, tuple(layers), backend, launcher, device)


@st.composite
def few_plans(draw: st.DrawFn, backends: Backends, device: str) -> Plan:
    """Draws one of `FEW_PLANS`, with one of `backends`."""
    family, layers = draw(st.sampled_from(FEW_PLANS))
    return Plan(family, layers, *draw(st.sampled_from(backends)), device)


def machine(
    backends: Backends = (("auto", "auto"),),
    device: str = "cpu",
    layers: Collection[str] = tuple(LAYERS),
    without: Collection[str] = (),
    few: bool = False,
) -> type[RuleBasedStateMachine]:
    """Makes a state machine whose rules are the acts.

    Args:
        backends: backends of the compiled twins, each with a value of `FLEXSN_LAUNCHER`.
        layers: names of the layers that networks are made of.
        without: names of acts that are left out.
        few: True to use only networks of `FEW_PLANS` and losses of `FEW_SUBSETS`. Then `layers` has no effect.
    """
    any_plan = few_plans(backends, device) if few else plans(backends, device, layers)

    class RandomLives(RuleBasedStateMachine):
        twins: Twins

        @initialize(plan=any_plan)
        def start(self, plan: Plan) -> None:
            self.twins = Twins(plan)

        def teardown(self) -> None:
            Twins.counts["lives"] += 1

    for act in (act for name, act in ACTS.items() if name not in without):
        for i in range(act.weight):
            setattr(RandomLives, f"{act.name}_{i}", _make_rule(act, i, FEW_SUBSETS if few else {}))
    return RandomLives


def _make_rule(act: Act, number: int, replacements: Mapping[str, st.SearchStrategy[Any]]) -> Callable[..., Any]:
    def perform(self: Any, **arguments: Any) -> None:
        self.twins.act(act.name, **arguments)

    perform.__name__ = f"{act.name}_{number}"
    strategies: dict[str, Any] = {name: replacements.get(name, strategy) for name, strategy in act.arguments.items()}
    decorate: Callable[[Any], Any] = rule(**strategies)
    rule_method = decorate(perform)
    add_condition: Callable[[Any], Callable[..., Any]] = precondition(lambda self: act.when(self.twins.loop))
    return add_condition(rule_method)


def run(lives: type[RuleBasedStateMachine], runs: int, rules: int, seed: int | None = None) -> None:
    """Runs random lives of at most `rules` acts each.

    Args:
        seed: seed of the lives; `None` to run the same lives each time.

    Raises:
        DifferenceError: the error of the shortest program that was found.
    """
    if seed is not None:
        lives = hypothesis.seed(seed)(lives)
    try:
        _run(lives, runs, rules, derandomize=seed is None)
    except DifferenceError as error:
        raise find_shortest(error) from None


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
            phases=[Phase.generate],  # without Phase.shrink, since `find_shortest` shrinks programs in bounded time
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
