"""Leaky integrate and fire with recurrent weights, also with an adaptive threshold."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._alif import ALIF
from flexsn_nn.neuron._connections import Initialize, connection
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._recurrent import Feedback
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class RLIF(Feedback, LIF):
    """`h = v - (v - v_reset) / tau + x + V s`, or with `decay_input` `h = v + (x + V s - (v - v_reset)) / tau`.

    `LIF` whose last spikes `s` pass through a matrix `V` into its input. Threshold and reset are those of
    `ImmediateReset`.

    Args:
        features: number of neurons, the last dimension of the step.
        tau: as in `LIF`.
        decay_input: as in `LIF`, but False by default: divided by `tau`, a single spike moves a membrane so little that
            a stack of these layers, as initialised, does not learn.
        v_threshold, v_reset, surrogate_function, detach_reset: as in `ImmediateReset`.
        all_to_all, V, bias, learn_recurrent, init: as in `Recurrent`.
        options: as in `ImmediateReset`.

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

    With `decay_input`, `h = v + (x + V s - (v - v_reset)) / tau`. `ALIF` whose last spikes `s` pass through a matrix
    `V` into its input: a layer of an LSNN. For the neurons of an LSNN without adaptation, set `beta` to 0:
    `beta=torch.cat([torch.zeros(60), torch.full((40,), 0.2)])`.

    Args:
        features: number of neurons, the last dimension of the step.
        tau_a, tau: as in `ALIF`.
        beta: as in `ALIF`, whose default 1.8 lets a neuron fire about once in `tau_a` steps.
        decay_input: as in `RLIF`.
        v_threshold, v_reset, surrogate_function, detach_reset: as in `ImmediateReset`.
        all_to_all, V, bias, learn_recurrent, init: as in `Recurrent`.
        options: as in `ImmediateReset`.

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
