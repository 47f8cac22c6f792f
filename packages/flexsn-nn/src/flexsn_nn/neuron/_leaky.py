"""snnTorch's leaky neuron."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn.neuron._reset import ATAN, DelayedReset, ResetOptions, SpikeFunction


class Leaky(DelayedReset):
    """`h = beta v + x`, minus the reset by the previous step's spike `r`; fires if `h > threshold`.

    The reset "subtract" computes `h = beta v + x - r threshold`, and "zero" computes `h = beta (1 - r) v + x`.

    Args:
        beta: factor of the membrane per step, in `[0, 1]`: a number, a tensor that broadcasts to the step (for example
            a value per neuron), or an `nn.Parameter`. In each step, tensors are limited to this range.
        threshold, spike_grad: same as in `DelayedReset`.
        learn_beta: True to make `beta` an `nn.Parameter`.
        learn_threshold, reset_mechanism, strict, options (`reset_delay`, `step_mode`, …): same as in `DelayedReset`.

    Example:
        >>> Leaky(beta=0.5)(torch.full((4, 1), 1.0)).flatten().tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    beta: float | Tensor

    def __init__(
        self,
        beta: float | Tensor,
        threshold: float | Tensor = 1.0,
        spike_grad: SpikeFunction = ATAN,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        reset_mechanism: str = "subtract",
        strict: bool | None = True,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(threshold, spike_grad, learn_threshold, reset_mechanism, strict, **options)
        self.hold_number("beta", beta, learn=learn_beta, at_least=0, at_most=1)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        r = self.spiked(v)
        beta = self.bounded("beta", self.beta, v)
        h = beta * self.after(v, r) + x if self.reset_mechanism == "zero" else self.after(beta * v + x, r)
        spike = self.fire(h)
        return spike, self.kept(h, spike, r)
