"""Leaky integrate and fire with a learned time constant."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_number
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import TAU_HINT
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions


class PLIF(ImmediateReset):
    """`h = v + (x - (v - v_reset)) sigmoid(w)`; without `decay_input`, `h = v - (v - v_reset) sigmoid(w) + x`.

    The neuron is a `LIF` with `1 / tau = sigmoid(w)` and a learned `w`.

    Args:
        init_tau: initial time constant, above 1. The initial `w` is `-log(init_tau - 1)`. A number gives a single `w`.
            A tensor that broadcasts to the step, for example `[C, 1, 1]`, gives a `w` of this shape.
        decay_input: True to also divide the input by `tau`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Source: Fang et al., "Incorporating learnable membrane time constant", ICCV 2021.
    """

    w: nn.Parameter
    decay_input: bool

    def __init__(
        self,
        init_tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        check_number("init_tau", init_tau, above=1, hint=TAU_HINT)
        if isinstance(init_tau, Tensor):
            w: float | Tensor = -torch.log(init_tau.detach() - 1)
        else:
            w = -math.log(init_tau - 1)
        self.hold("w", w, learn=True)
        self.hold("decay_input", decay_input)

    @property
    def tau(self) -> Tensor:
        """Current time constants in steps, shaped like `w`."""
        return 1 / torch.sigmoid(self.w.detach())

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        rate = fit(torch.sigmoid(self.w), v)
        leak = v - self.v_start
        h = v + (x - leak) * rate if self.decay_input else v - leak * rate + x
        spike = self.fire(h)
        return spike, self.after(h, spike)
