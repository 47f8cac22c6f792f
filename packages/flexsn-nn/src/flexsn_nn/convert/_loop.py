"""Neurons that are called like snnTorch's neurons, for networks that loop over time.

    mem = lif.reset_mem()
    for step in x:
        spk, mem = lif(step, mem)       init_hidden=False
        spk = lif(step)                 init_hidden=True

In step mode `"m"`, the calls take a whole sequence and return sequences: `spk, mem = lif(x)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from flexsn_nn.errors import InputCountError
from flexsn_nn.neuron import Alpha, DelayedReset, Leaky, RLeaky, RSynaptic, Synaptic, fit
from flexsn_nn.neuron._reset import SpikeFunction
from flexsn_nn.transforms import Transform


class LoopOptions(TypedDict, total=False):
    """Options that all neurons of this module have; see `LoopNeuron` and `DelayedReset`."""

    spike_grad: SpikeFunction
    reset_mechanism: str
    strict: bool | None
    backend: str
    init_hidden: bool
    output: bool
    reset_delay: bool


class LoopNeuron(DelayedReset):
    """A `DelayedReset` with snnTorch's `forward`. Its initial step mode is `"s"`.

    Args:
        init_hidden: True if the module stores the states instead of taking them as arguments.
        output: True to return the states even if the module stores them.
        graded_spikes_factor: factor by which each spike is multiplied.
        arguments: other arguments of the neuron's class.
    """

    passed_names: ClassVar[tuple[str, ...]]
    graded_spikes_factor: float | Tensor
    init_hidden: bool
    output: bool

    def __init__(
        self,
        *,
        init_hidden: bool = False,
        output: bool = False,
        graded_spikes_factor: float | Tensor = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(step_mode="s", store_state_seqs=output or not init_hidden, **arguments)
        self.init_hidden, self.output = init_hidden, output
        self.hold_number("graded_spikes_factor", graded_spikes_factor)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *states: Tensor | None,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        transforms: Sequence[Transform] = (),
        **named: Tensor | None,
    ) -> Any:
        """Returns the spikes, and then the states unless `init_hidden` is True and `output` is False, as in snnTorch.

        Args:
            x: `[*step]`, or `[T, *step]` in step mode `"m"`.
            states: states in snnTorch's order, or as keyword arguments with snnTorch's names. If a state is `None` or
                absent, the state that the neuron stores is used. A state that is not shaped like the step, such as the
                empty state from `reset_mem`, is replaced by zeros.
            lengths, resets, transforms: same as in `FlexSN`.

        Raises:
            TypeError: states are passed although `init_hidden=True`, or their names are unknown.
            InputCountError: too many states are passed.
        """
        passed_states = self._collect_states(states, named)
        step = x if self.step_mode == "s" else x.new_empty(()).expand(x.shape[1:])
        stored: list[Tensor | None] = [*self.states] or [None] * self.num_states
        current = [new if new is not None else old for new, old in zip(passed_states, stored, strict=True)]
        if any(state is not None for state in current):
            zeros = x.new_zeros(step.shape)
            self.states = [s if s is not None and s.shape == step.shape else zeros for s in current]
        spikes = super().forward(x, lengths=lengths, resets=resets, transforms=transforms)
        if self.init_hidden and not self.output:
            return spikes
        new_states = self.states if self.step_mode == "s" else self.state_seqs
        # The first state of recurrent neurons is the last spikes. The spikes are already the output, so they are not
        # returned again.
        return spikes, *(new_states[1:] if self.state_names[0] == "s" else new_states)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, *states)`."""
        spike, *new = self.base_dynamics(x, *states)
        graded = spike * fit(self.graded_spikes_factor, spike)
        if self.state_names[0] == "s":  # the returned spikes are fed back
            new[0] = graded
        return graded, *new

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step before `graded_spikes_factor` is applied."""
        raise NotImplementedError

    def reset_mem(self) -> Any:
        """Drops the states. Returns the states for the first step, as one tensor or a tuple."""
        self.reset()
        first = tuple(torch.zeros(0) for _ in self.passed_names)
        return first[0] if len(first) == 1 else first

    init_leaky = init_synaptic = init_alpha = init_lapicque = init_rleaky = init_rsynaptic = reset_mem

    @property
    def mem(self) -> Tensor:
        """Membrane; empty before the first step."""
        return self._state_or_empty("v")

    def _state_or_empty(self, name: str) -> Tensor:
        state = self.state(name)
        return torch.zeros(0) if state is None else state

    def _collect_states(
        self, states: tuple[Tensor | None, ...], named: dict[str, Tensor | None]
    ) -> list[Tensor | None]:
        names = ", ".join(self.passed_names)
        if len(states) > len(self.passed_names):
            raise InputCountError(f"got {len(states)} states; {type(self).__name__} takes {names}.")
        unknown = [name for name in named if name not in self.passed_names[len(states) :]]
        if unknown:
            raise TypeError(f"unexpected argument {unknown[0]!r}; the states are {names}.")
        passed_states = [*states, *(named.get(name) for name in self.passed_names[len(states) :])]
        if self.init_hidden and any(state is not None for state in passed_states):
            raise TypeError(f"with init_hidden=True, the neuron stores its states, so do not pass {names}.")
        return passed_states


class LoopLeaky(LoopNeuron, Leaky):
    """`Leaky`, called as `spk, mem = lif(x, mem)`."""

    passed_names = ("mem",)

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        return Leaky.dynamics(self, x, *states)


class LoopSynaptic(LoopNeuron, Synaptic):
    """`Synaptic`, called as `spk, syn, mem = lif(x, syn, mem)`."""

    passed_names = ("syn", "mem")

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, i, v)`."""
        return Synaptic.dynamics(self, x, *states)

    @property
    def syn(self) -> Tensor:
        """Synaptic current; empty before the first step."""
        return self._state_or_empty("i")


class LoopRLeaky(LoopNeuron, RLeaky):
    """`RLeaky`, called as `spk, mem = lif(x, spk, mem)`."""

    passed_names = ("spk", "mem")

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, v)`."""
        return RLeaky.dynamics(self, x, *states)

    @property
    def spk(self) -> Tensor:
        """Last spikes; empty before the first step."""
        return self._state_or_empty("s")


class LoopRSynaptic(LoopNeuron, RSynaptic):
    """`RSynaptic`, called as `spk, syn, mem = lif(x, spk, syn, mem)`."""

    passed_names = ("spk", "syn", "mem")

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, i, v)`."""
        return RSynaptic.dynamics(self, x, *states)

    @property
    def spk(self) -> Tensor:
        """Last spikes; empty before the first step."""
        return self._state_or_empty("s")

    @property
    def syn(self) -> Tensor:
        """Synaptic current; empty before the first step."""
        return self._state_or_empty("i")


class LoopAlpha(LoopNeuron, Alpha):
    """`Alpha`, called as `spk, syn_exc, syn_inh, mem = lif(x, syn_exc, syn_inh, mem)`."""

    passed_names = ("syn_exc", "syn_inh", "mem")

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, e, i, v)`."""
        return Alpha.dynamics(self, x, *states)

    @property
    def syn_exc(self) -> Tensor:
        """Excitatory current; empty before the first step."""
        return self._state_or_empty("e")

    @property
    def syn_inh(self) -> Tensor:
        """Inhibitory current; empty before the first step."""
        return self._state_or_empty("i")


class LoopLapicque(LoopNeuron):
    """`Lapicque`, called as `spk, mem = lif(x, mem)`. Its formula and its rounding are those of snnTorch.

    `h = x R (1 / (R C)) dt + (1 - dt / (R C)) v`, followed by the reset of `DelayedReset`. `dt` is `time_step`. `beta`
    is stored but has no effect on a step, as in snnTorch.
    """

    passed_names = ("mem",)
    beta: float | Tensor
    R: float | Tensor
    C: float | Tensor
    time_step: float | Tensor

    def __init__(
        self,
        threshold: float | Tensor = 1.0,
        beta: float | Tensor = 0.5,
        R: float | Tensor = 1.0,
        C: float | Tensor = 1.0,
        time_step: float | Tensor = 1.0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(threshold=threshold, learn_threshold=False, **options)
        for name, value in {"beta": beta, "R": R, "C": C, "time_step": time_step}.items():
            self.hold_number(name, value, above=0)

    def base_dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        (v,) = states
        R, C, dt = fit(self.R, v), fit(self.C, v), fit(self.time_step, v)
        h = x * R * (1 / (R * C)) * dt + (1 - dt / (R * C)) * v
        r = self.spiked(v)
        h = self.after(h, r)
        spike = self.fire(h)
        return spike, self.kept(h, spike, r)
