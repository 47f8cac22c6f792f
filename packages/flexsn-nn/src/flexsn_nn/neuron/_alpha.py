"""snnTorch's neuron with an alpha-shaped response of the membrane."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._reset import ATAN, DelayedReset, ResetOptions, SpikeFunction


class Alpha(DelayedReset):
    """`e' = alpha e + x`; `i' = beta i - x`; `h = tau_alpha (e' + i')`, then the reset.

    The membrane is the sum of two exponential currents, so it rises and then falls after each input. `tau_alpha =
    log(alpha) / (log(beta) - log(alpha)) + 1`. The neuron fires if `h > threshold`. `r` is the spike of the previous
    step. The reset "zero" multiplies `e'`, `i'` and `h` by `1 - r`. The reset "subtract" computes `e' - r threshold`,
    `(1 - r) i'` and `h + r i`.

    Args:
        alpha: factor of the excitatory current per step, in `(0, 1)` and above `beta`.
        beta: factor of the inhibitory current per step, in `(0, 1)`.
        threshold, spike_grad: same as in `DelayedReset`.
        learn_alpha, learn_beta: True to make `alpha` or `beta` an `nn.Parameter`.
        learn_threshold, reset_mechanism, strict, options (`reset_delay`, `step_mode`, …): same as in `DelayedReset`.

    `alpha` and `beta` are numbers, tensors that broadcast to the step, or `nn.Parameter`s. In each step, tensors are
    limited to the range `(0, 1)`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("e", "i", "v")
    alpha: float | Tensor
    beta: float | Tensor

    def __init__(
        self,
        alpha: float | Tensor,
        beta: float | Tensor,
        threshold: float | Tensor = 1.0,
        spike_grad: SpikeFunction = ATAN,
        learn_alpha: bool = False,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        reset_mechanism: str = "zero",
        strict: bool | None = True,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(threshold, spike_grad, learn_threshold, reset_mechanism, strict, **options)
        self.hold_number("alpha", alpha, learn=learn_alpha, above=0, below=1)
        self.hold_number("beta", beta, learn=learn_beta, above=0, below=1)
        if not bool((torch.as_tensor(alpha) > torch.as_tensor(beta)).all()):
            raise ParameterError(f"alpha is {alpha} and beta is {beta}: alpha must be larger than beta.")

    def dynamics(self, x: Tensor, e: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, e, i, v)`."""
        r = self.spiked(v)
        alpha, beta = self.bounded("alpha", self.alpha, v), self.bounded("beta", self.beta, v)
        new_e = alpha * e + x
        new_i = beta * i - x
        log_alpha, log_beta = fit(_log(alpha), v), fit(_log(beta), v)
        log_ratio = log_beta - log_alpha
        if isinstance(log_ratio, Tensor):  # training may make alpha equal to beta or smaller than beta
            log_ratio = log_ratio.clamp(max=-torch.finfo(log_ratio.dtype).eps)
        h = (log_alpha / log_ratio + 1) * (new_e + new_i)
        if self.reset_mechanism == "zero":
            new_e, new_i, h = self.after(new_e, r), self.after(new_i, r), self.after(h, r)
        elif self.reset_mechanism == "subtract":
            new_e, new_i, h = self.after(new_e, r), new_i - r * new_i, h + r * i
        spike = self.fire(h)
        return spike, new_e, new_i, self.kept(h, spike, r)


def _log(value: float | Tensor) -> float | Tensor:
    return torch.log(value) if isinstance(value, Tensor) else math.log(value)
