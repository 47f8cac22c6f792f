"""Settings of `FlexSN`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexsn_nn._backends import BACKENDS, Backend, StepMode, check_backend, check_step_mode, takes_step_mode
from flexsn_nn._checks import check_count
from flexsn_nn._decisions import Decisions
from flexsn_nn._firing import Firing
from flexsn_nn._leaf import Leaf
from flexsn_nn._refusals import Refusals
from flexsn_nn._stateful import is_own_forward
from flexsn_nn.noise._numbers import Numbers
from flexsn_nn.transforms._precision import InFloat32
from flexsn_nn.transforms._transform import Transform


class Settings(Leaf):
    """Part of `FlexSN` that holds the core and the settings of calls.

    Attributes:
        core, num_inputs, num_states, num_outputs, requires_grad, store_state_seqs: same as in `FlexSN`.
    """

    core: Callable[..., Any]
    num_inputs: int
    num_states: int
    num_outputs: int
    requires_grad: Sequence[bool] | None
    store_state_seqs: bool
    _backend: Backend
    _step_mode: StepMode
    _residuals: str
    _spike_range: tuple[int, int] | None
    _decisions: Decisions
    _refusals: Refusals
    _numbers: Numbers
    # True if the core draws random numbers.
    _draws: bool
    _firing: Firing | None
    # Transforms of every call. They are the innermost transforms.
    _own_transforms: tuple[Transform, ...] = ()
    # Transforms of calls inside of `functional.run`.
    _shared_transforms: tuple[Transform, ...] = ()

    @property
    def backend(self) -> str:
        """Requested backend. `explain()` reports the backend that runs."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_backend(backend, self._step_mode)
        self._forget_decisions()

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        mode = check_step_mode(step_mode)
        check_backend(self._backend, mode)
        self._step_mode = mode
        self._forget_decisions()

    @property
    def supported_backends(self) -> tuple[str, ...]:
        """Backends that can be requested in this step mode. SpikingJelly's `set_backend` reads this attribute."""
        return tuple(name for name in BACKENDS if takes_step_mode(name, self._step_mode))

    @property
    def spike_range(self) -> tuple[int, int] | None:
        """Smallest and largest whole number in the (first) output: `(0, 1)` for spikes; `None` for arbitrary numbers.

        Ready-made neurons define this range. If your own step returns only whole numbers, set the range, so that
        `memory.PackedSpikes` can store the output as bits.
        """
        if self._spike_range is None and is_own_forward(self):
            return self._own_spike_range()
        return self._spike_range

    @spike_range.setter
    def spike_range(self, spike_range: tuple[int, int] | None) -> None:
        if spike_range is not None:
            low, high = spike_range
            check_count("spike_range[0]", low, at_least=-(2**31))
            check_count("spike_range[1]", high, at_least=low + 1)
            spike_range = low, high
        self._spike_range = spike_range

    def _own_spike_range(self) -> tuple[int, int] | None:
        """Returns the `spike_range` that the step itself guarantees; `None` if the step guarantees no range."""
        return None

    @property
    def precision(self) -> str:
        """`"eager"` or `"float32"`."""
        return "float32" if any(isinstance(t, InFloat32) for t in self._own_transforms) else "eager"

    @property
    def residuals(self) -> str:
        """Choice of the values that are saved for the backward: `"auto"`, `"recompute"` or `"save"`."""
        return self._residuals

    @property
    def watch_firing(self) -> bool:
        """True if a `FiringWarning` is given when the neuron never or always fires in training."""
        return self._firing is not None

    @watch_firing.setter
    def watch_firing(self, watch_firing: bool) -> None:
        self._firing = Firing() if watch_firing else None

    def _forget_decisions(self) -> None:
        """Drops the records of backends and of refusals, because the core or a setting has changed."""
        if "_decisions" in self.__dict__:  # absent during construction
            self._decisions.clear()
            self._refusals = Refusals()
