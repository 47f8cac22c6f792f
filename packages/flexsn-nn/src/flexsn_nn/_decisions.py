"""Record of the backends that ran a neuron's calls. Later calls use the record, and `explain()` prints it."""

from __future__ import annotations

from collections.abc import Hashable

from flexsn_nn._backends import COMPILED, Choice

# Device type of a call, and True if a compiler traces the call.
Situation = tuple[str, bool]

# Maximum number of stored outcomes per situation. Each new reason for a loop adds an outcome, so the list could grow
# without end.
_MOST = 16


class Decisions:
    """Backends that were chosen for a neuron, and backends that ran its calls, since the neuron was last changed."""

    def __init__(self) -> None:
        self._choices: dict[Situation, Choice] = {}
        # Each choice is stored with the kinds of the core's modules.
        self._ran: dict[Situation, list[tuple[Hashable, Choice]]] = {}

    def __bool__(self) -> bool:
        return bool(self._choices)

    def choice(self, situation: Situation) -> Choice | None:
        """Returns the backend that was chosen for a situation; `None` if no backend is chosen yet."""
        return self._choices.get(situation)

    def record_choice(self, situation: Situation, choice: Choice) -> None:
        """Records the backend for a situation."""
        self._choices[situation] = choice

    def record_run(self, situation: Situation, loop_reason: str | None, kinds: Hashable) -> None:
        """Records that a call ran on the chosen backend, or as the loop.

        Args:
            loop_reason: reason for the loop; `None` if the chosen backend ran.
            kinds: kinds of the core's modules, from `kinds_of`.
        """
        chosen = self._choices[situation]
        choice = chosen if loop_reason is None else Choice("torch", loop_reason, {})
        outcomes = self._ran.setdefault(situation, [])
        if (kinds, choice) not in outcomes and len(outcomes) < _MOST:
            outcomes.append((kinds, choice))

    def forget(self, situation: Situation) -> None:
        """Drops the record of calls in a situation, because the core has changed."""
        self._ran.pop(situation, None)

    def clear(self) -> None:
        """Drops the whole record, because the neuron was changed."""
        self._choices.clear()
        self._ran.clear()

    def latest(self, situation: Situation, kinds: Hashable) -> Choice | None:
        """Returns the last recorded choice for calls with modules of these kinds; `None` if no choice is recorded."""
        choices = self._list_choices(situation, kinds) if situation in self._choices else []
        return choices[-1] if choices else None

    @property
    def has_kernels(self) -> bool:
        """True if kernels are chosen in any situation, even if they have not run yet."""
        return any(choice.backend in COMPILED for choice in self._choices.values())

    def has_launched(self, kinds: Hashable) -> bool:
        """True if kernels ran, or are chosen to run, calls with modules of these kinds outside of compilers."""
        outside = [situation for situation in self._choices if not situation[1]]
        return any(
            choice.backend in COMPILED for situation in outside for choice in self._list_choices(situation, kinds)
        )

    def verdict(self, kinds: Hashable) -> str | None:
        """Summarises all calls with modules of these kinds in one line. Returns `None` if all calls ran alike."""
        outcomes = [
            (situation[1], choice) for situation in self._choices for choice in self._list_choices(situation, kinds)
        ]
        if len(outcomes) < 2:
            return None
        names = [f"{choice.backend}{' inside torch.compile' if inside else ''}" for inside, choice in outcomes]
        return f"calls ran in {len(outcomes)} ways: {', '.join(names)}"

    def lines(self, kinds: Hashable) -> list[str]:
        """Returns the lines of `explain()` about calls with modules of these kinds.

        The lines are a summary, if there are several outcomes, and a description of each outcome.
        """
        verdict = self.verdict(kinds)
        lines = [] if verdict is None else [verdict]
        for situation in self._choices:
            for choice in self._list_choices(situation, kinds):
                inside = " inside torch.compile" if situation[1] else ""
                lines.append(f"{choice.backend}{inside}: {choice.reason}")
                lines += [f"  not {name}: {reason}" for name, reason in choice.refused.items()]
        return lines

    def _list_choices(self, situation: Situation, kinds: Hashable) -> list[Choice]:
        if situation not in self._ran:
            return [self._choices[situation]]
        return [choice for recorded_kinds, choice in self._ran[situation] if recorded_kinds == kinds]
