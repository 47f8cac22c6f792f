"""Layers that keep a state from call to call and are no scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flexsn_nn._backends import StepMode, check_step_mode
from flexsn_nn._leaf import Leaf


def is_own_forward(module: nn.Module) -> bool:
    """Whether calls return what this package's class computes: its `forward` was not overridden."""
    module_of: str = getattr(module.forward, "__module__", "")
    return module_of.startswith("flexsn_nn.")


class Stateful(Leaf):
    """What `functional.reset_net`, `detach_net`, `get_states`, `set_states` and `set_step_mode` work on beside neurons.

    Args:
        step_mode: `"m"` for sequences `[T, *step]`, `"s"` for single steps.

    Attributes:
        states: tensors, or empty before the first call and after `reset()`; no part of `state_dict()`.
    """

    def __init__(self, step_mode: str = "m") -> None:
        super().__init__()
        self._step_mode: StepMode = check_step_mode(step_mode)
        self.states: list[Tensor] = []

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        self._step_mode = check_step_mode(step_mode)

    def reset(self) -> None:
        """Forgets the state."""
        self.states = []

    def detach(self) -> None:
        """Cuts the state off from the graph that led to it."""
        self.states = [state.detach() for state in self.states]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the state is cut off from its graph."""
        return {**self.__dict__, "states": [state.detach() for state in self.states]}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stateful:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.states = [fn(state) for state in self.states]
        return self
