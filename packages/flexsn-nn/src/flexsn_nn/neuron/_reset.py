"""Thresholds and resets in two conventions: a spike resets the membrane in the same step, or in the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor

from flexsn_nn._checks import check_function, check_name, check_number
from flexsn_nn._torch_private import constant
from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._base import Neuron, RunOptions, fit
from flexsn_nn.surrogate import ATan, Rect, Sigmoid, Surrogate

SpikeFunction = Callable[[Tensor], Tensor]

SIGMOID = Sigmoid()
ATAN = ATan()
RECT = Rect()
RESET_MECHANISMS = ("subtract", "zero", "none")


class SpikeOptions(RunOptions, total=False):
    """`RunOptions` and `strict`; see `ImmediateReset`."""

    strict: bool | None


class ResetOptions(RunOptions, total=False):
    """`RunOptions` and `reset_delay`; see `DelayedReset`."""

    reset_delay: bool


class ImmediateReset(Neuron):
    """A neuron that fires if `h >= v_threshold`, and resets in the same step.

        s = step(h - v_threshold)
        v' = s v_reset + (1 - s) h      hard reset
        v' = h - s v_threshold          soft reset, `v_reset=None`

    The membrane `v` begins at `v_reset`, or at 0 with the soft reset. Other states begin at 0.

    Args:
        v_threshold: a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
        v_reset: value of the membrane after a spike; `None` for the soft reset.
        surrogate_function: function that computes spikes from `h - v_threshold`.
        detach_reset: True if the gradient does not flow through the reset to `s`.
        num_inputs: number of inputs that `dynamics` takes before its states.
        strict: True to fire if `h > v_threshold`, False to fire if `h >= v_threshold`. `None` if the surrogate
            determines the comparison.
        options: same as in `Neuron`.

    Raises:
        ParameterError: a number is not finite, `v_reset` is a tensor, or `strict` is given with your own spike
            function.
    """

    v_threshold: float | Tensor
    v_reset: float | None
    surrogate_function: SpikeFunction
    detach_reset: bool

    def __init__(
        self,
        v_threshold: float | Tensor,
        v_reset: float | None,
        surrogate_function: SpikeFunction,
        detach_reset: bool,
        num_inputs: int = 1,
        strict: bool | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(num_inputs, **options)
        self.hold_number("v_threshold", v_threshold)
        if isinstance(v_reset, Tensor):
            raise ParameterError(
                "v_reset is a tensor; expected one number for all neurons, or None for the soft reset: give "
                "float(v_reset), or write your own step function, in which the reset may be a tensor."
            )
        if v_reset is not None:
            check_number("v_reset", v_reset)
        self.hold("v_reset", v_reset)
        self.hold("surrogate_function", with_strictness("surrogate_function", surrogate_function, strict))
        self.hold("detach_reset", detach_reset)

    @property
    def v_start(self) -> float:
        """Value at which the membrane begins, and to which it leaks: `v_reset`, or 0 with the soft reset."""
        return 0.0 if self.v_reset is None else self.v_reset

    def fire(self, h: Tensor, threshold: float | Tensor | None = None) -> Tensor:
        """Computes the spikes of the charged membrane. `threshold` defaults to `v_threshold`."""
        return self.surrogate_function(h - self._get_threshold(h, threshold))

    def after(self, h: Tensor, spike: Tensor, threshold: float | Tensor | None = None) -> Tensor:
        """Computes the membrane after the reset. `threshold` defaults to `v_threshold`."""
        if self.detach_reset:
            spike = spike.detach()
        if self.v_reset is None:
            return h - spike * self._get_threshold(h, threshold)
        return spike * self.v_reset + (1 - spike) * h

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        """Returns the initial states: `v` is `v_start`, and the other states are 0."""
        states = super().init_states(num_states, step_mode, *inputs)
        v_start = self._read_v_start()
        if v_start != 0:
            v = self.state_names.index("v")
            states[v] = states[v] + v_start
        return states

    def _starts_at_zero(self) -> bool:
        return self._starts_by(ImmediateReset) and self._read_v_start() == 0

    # torch.compile(dynamic=True) would turn `v_start` into a symbol. The core is compiled separately and cannot take
    # this symbol as an argument. Inside of the core, `v_start` is guarded.
    @constant
    def _read_v_start(self) -> float:
        return self.v_start

    def _own_spike_range(self) -> tuple[int, int] | None:
        return spike_range_of(self, self.surrogate_function)

    def _get_threshold(self, h: Tensor, threshold: float | Tensor | None) -> float | Tensor:
        return fit(self.v_threshold, h) if threshold is None else threshold


class DelayedReset(Neuron):
    """A neuron that fires if `h > threshold` and resets in the next step, like snnTorch's neurons.

        r = step(v - threshold)         1 if the last step spiked; has no gradient
        h = the charge, minus `r threshold` ("subtract"), or 0 where `r` is 1 ("zero"), or unchanged ("none")
        s = step(h - threshold)

    Args:
        threshold: a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
        spike_grad: function that computes spikes from `h - threshold`.
        learn_threshold: True to make the threshold an `nn.Parameter`.
        reset_mechanism: `"subtract"`, `"zero"` or `"none"`.
        strict: True to fire if `h > threshold`, False to fire if `h >= threshold`. `None` if `spike_grad` determines
            the comparison.
        reset_delay: False if the spike of a step resets the membrane in the same step, before the membrane becomes the
            new state. The gradient then flows through the reset.
        options: same as in `Neuron`.

    Raises:
        UnknownNameError: `reset_mechanism` is unknown.
        ParameterError: the threshold is not finite, or `strict` is given with your own spike function.
    """

    threshold: float | Tensor
    spike_grad: SpikeFunction
    reset_mechanism: str
    reset_delay: bool

    def __init__(
        self,
        threshold: float | Tensor,
        spike_grad: SpikeFunction,
        learn_threshold: bool,
        reset_mechanism: str,
        strict: bool | None,
        reset_delay: bool = True,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(**options)
        self.hold_number("threshold", threshold, learn=learn_threshold)
        self.hold("spike_grad", with_strictness("spike_grad", spike_grad, strict))
        self.hold("reset_mechanism", reset_mechanism)
        self.hold("reset_delay", reset_delay)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reset_mechanism":
            check_name(name, value, RESET_MECHANISMS)
        super().__setattr__(name, value)

    def fire(self, h: Tensor) -> Tensor:
        """Computes the spikes of the charged membrane."""
        return self.spike_grad(h - fit(self.threshold, h))

    def spiked(self, v: Tensor) -> Tensor:
        """Computes `r` from the last membrane: 1 where the last step spiked, and 0 elsewhere. `r` has no gradient."""
        return self.fire(v).detach()

    def after(self, h: Tensor, r: Tensor) -> Tensor:
        """Computes the charge `h` after the reset by the previous step's spikes."""
        if self.reset_mechanism == "subtract":
            return h - r * fit(self.threshold, h)
        return h - r * h if self.reset_mechanism == "zero" else h

    def kept(self, h: Tensor, spike: Tensor, r: Tensor) -> Tensor:
        """Computes the membrane's new state: `h`, which this step's spike resets if `reset_delay` is False.

        Args:
            h: charge after the reset by the previous step's spikes `r`.
            spike: spike of this step. Where `r` has already reset the membrane, the spike does not reset it again.
        """
        return h if self.reset_delay else self.after(h, spike - r)

    def _own_spike_range(self) -> tuple[int, int] | None:
        return spike_range_of(self, self.spike_grad)


def spike_range_of(neuron: Neuron, function: SpikeFunction) -> tuple[int, int] | None:
    """Returns the range of a ready-made step's output, as given by its surrogate; `None` for a user's step."""
    for name in ("dynamics", "fire"):
        method = getattr(neuron, name, None)
        if method is not None and not method.__module__.startswith("flexsn_nn.neuron."):
            return None
    return surrogate_spike_range(function)


def surrogate_spike_range(function: SpikeFunction) -> tuple[int, int] | None:
    """Returns `(0, 1)` for a surrogate; `None` for a user's function, which may return any number."""
    return (0, 1) if isinstance(function, Surrogate) and type(function).__call__ is Surrogate.__call__ else None


def with_strictness(name: str, function: SpikeFunction, strict: bool | None) -> SpikeFunction:
    """Returns the spike function with the comparison that `strict` requires; unchanged if `strict` is `None`."""
    check_function(name, function)
    if strict is None:
        return function
    if not isinstance(function, Surrogate):
        raise ParameterError(
            f"strict={strict} sets the comparison of a flexsn_nn.surrogate; {name} is {function!r}, which "
            "compares by itself: pass strict=None."
        )
    return replace(function, strict=strict)
