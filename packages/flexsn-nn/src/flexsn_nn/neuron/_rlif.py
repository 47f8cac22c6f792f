"""Leaky integrate and fire with recurrent weights, with a fixed or an adaptive threshold."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._alif import ALIF
from flexsn_nn.neuron._connections import Initialize, connection
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._recurrent import Feedback
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class RLIF(Feedback, LIF):
    """`h = v - (v - v_reset) / tau + x + V s`; with `decay_input`, `h = v + (x + V s - (v - v_reset)) / tau`.

    The neuron is a `LIF`. A matrix `V` maps the previous spikes `s` of the layer to its input. The threshold and reset
    are those of `ImmediateReset`.

    Args:
        features: number of neurons, which is the size of the step's last dimension.
        tau: same as in `LIF`.
        decay_input: same as in `LIF`, but the default is False. With the division by `tau`, a single spike moves the
            membrane so little that a stack of these layers with their initial weights does not begin to learn.
        v_threshold, v_reset, surrogate_function, detach_reset: same as in `ImmediateReset`.
        all_to_all, V, bias, learn_recurrent, init: same as in `Recurrent`.
        options: same as in `ImmediateReset`.

    Example:
        >>> layer = RLIF(3)
        >>> layer(torch.rand(5, 2, 3)).shape, layer.recurrent.weight.shape
        (torch.Size([5, 2, 3]), torch.Size([3, 3]))
    """

    state_names: ClassVar[tuple[str, ...]] = ("s", "v")

    def __init__(
        self,
        features: int | None = None,
        tau: float | Tensor = 2.0,
        decay_input: bool = False,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        *,
        all_to_all: bool = True,
        V: float | Tensor = 1.0,
        bias: bool = False,
        learn_recurrent: bool = True,
        init: Initialize | None = None,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.recurrent = connection(features, all_to_all, V, bias, learn_recurrent, init)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, v)`."""
        s, v = states
        spike, v = LIF.dynamics(self, x + self.recurrent(s), v)
        return spike, spike, v


class RALIF(Feedback, ALIF):
    """`h = v - (v - v_reset) / tau + x + V s`; `s' = step(h - v_threshold - beta a)`; `a' = exp(-1 / tau_a) a + s'`.

    With `decay_input`, `h = v + (x + V s - (v - v_reset)) / tau`. The neuron is an `ALIF`. A matrix `V` maps the
    previous spikes `s` of the layer to its input, as in a layer of an LSNN. For the neurons of an LSNN that do not
    adapt, set `beta` to 0: `beta=torch.cat([torch.zeros(60), torch.full((40,), 0.2)])`.

    Args:
        features: number of neurons, which is the size of the step's last dimension.
        tau_a, tau: same as in `ALIF`.
        beta: same as in `ALIF`. With the default of `ALIF`, 1.8, a neuron would fire only about once in `tau_a` steps.
        decay_input: same as in `RLIF`.
        v_threshold, v_reset, surrogate_function, detach_reset: same as in `ImmediateReset`.
        all_to_all, V, bias, learn_recurrent, init: same as in `Recurrent`.
        options: same as in `ImmediateReset`.

    Source: Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking neurons",
    NeurIPS 2018.
    """

    state_names: ClassVar[tuple[str, ...]] = ("s", "v", "a")

    def __init__(
        self,
        features: int | None = None,
        tau_a: float | Tensor = 200.0,
        beta: float | Tensor = 0.2,
        tau: float | Tensor = 2.0,
        decay_input: bool = False,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        *,
        all_to_all: bool = True,
        V: float | Tensor = 1.0,
        bias: bool = False,
        learn_recurrent: bool = True,
        init: Initialize | None = None,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(
            tau_a, beta, tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options
        )
        self.recurrent = connection(features, all_to_all, V, bias, learn_recurrent, init)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, v, a)`."""
        s, v, a = states
        spike, v, a = ALIF.dynamics(self, x + self.recurrent(s), v, a)
        return spike, spike, v, a
