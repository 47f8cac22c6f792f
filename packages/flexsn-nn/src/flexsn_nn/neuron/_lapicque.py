"""snnTorch's Lapicque neuron, an RC circuit."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import check_number
from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._reset import ATAN, DelayedReset, ResetOptions, SpikeFunction


class Lapicque(DelayedReset):
    """`h = (1 - dt / (R C)) v + dt / C x`, minus the reset by the previous step's spike `r`.

    The neuron fires if `h > threshold`. The reset "subtract" computes `h - r threshold`, and "zero" computes `(1 - r)
    h`.

    Resistance `R`, capacitance `C` and decay `beta = exp(-dt / (R C))` determine each other: give two of them, or only
    `beta` (then `R = 1`). The neuron stores `beta` and `R`, and computes `dt / (R C)` as `-log(beta)`, so that `beta`
    can be learned.

    Args:
        beta: decay per step, in `(0, 1)`.
        R, C: resistance and capacitance, above 0.
        time_step: duration `dt` of a step, above 0.
        threshold, spike_grad: same as in `DelayedReset`.
        learn_beta: True to make `beta` an `nn.Parameter`.
        learn_threshold, reset_mechanism, strict, options (`reset_delay`, `step_mode`, …): same as in `DelayedReset`.

    `beta`, `R`, `C` and `time_step` are numbers, or tensors that broadcast to the step.

    Raises:
        ParameterError: `beta`, `R` and `C` are all given, or too few of them to determine the others.
    """

    beta: float | Tensor
    R: float | Tensor

    def __init__(
        self,
        beta: float | Tensor | None = None,
        R: float | Tensor | None = None,
        C: float | Tensor | None = None,
        time_step: float = 1.0,
        threshold: float | Tensor = 1.0,
        spike_grad: SpikeFunction = ATAN,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        reset_mechanism: str = "subtract",
        strict: bool | None = True,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(threshold, spike_grad, learn_threshold, reset_mechanism, strict, **options)
        check_number("time_step", time_step, above=0)
        for name, value in {"R": R, "C": C}.items():
            if value is not None:
                check_number(name, value, above=0)
        if beta is None:
            if R is None or C is None:
                raise ParameterError("give beta, or both R and C.")
            beta = _exp(-time_step / (R * C))
        elif R is not None and C is not None:
            raise ParameterError("beta, R and C determine each other: give at most two of them.")
        self.hold_number("beta", beta, learn=learn_beta, above=0, below=1)
        if R is None:
            R = 1.0 if C is None else time_step / (-_log(beta) * C)
        self.hold_number("R", R, above=0, finite=True)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        rate = -fit(_log(self.bounded("beta", self.beta, v)), v)
        h = (1 - rate) * v + rate * self.bounded("R", self.R, v) * x
        r = self.spiked(v)
        h = self.after(h, r)
        spike = self.fire(h)
        return spike, self.kept(h, spike, r)


def _log(value: float | Tensor) -> float | Tensor:
    return torch.log(value) if isinstance(value, Tensor) else math.log(value)


def _exp(value: float | Tensor) -> float | Tensor:
    return torch.exp(value) if isinstance(value, Tensor) else math.exp(value)
