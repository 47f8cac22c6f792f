"""snnTorch's leaky neuron with a synaptic current."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._reset import ATAN, DelayedReset, ResetOptions, SpikeFunction


class Synaptic(DelayedReset):
    """`i' = alpha i + x`; `h = beta v + i'`, minus the reset by the previous step's spike `r`.

    The neuron fires if `h > threshold`. The reset "subtract" computes `h - r threshold`, and "zero" computes `(1 - r)
    h`. The current is not reset.

    Args:
        alpha: factor of the synaptic current per step, in `[0, 1]`.
        beta: factor of the membrane per step, in `[0, 1]`.
        threshold, spike_grad: same as in `DelayedReset`.
        learn_alpha, learn_beta: True to make `alpha` or `beta` an `nn.Parameter`.
        learn_threshold, reset_mechanism, strict, options (`reset_delay`, `step_mode`, …): same as in `DelayedReset`.

    `alpha` and `beta` are numbers, tensors that broadcast to the step, or `nn.Parameter`s. In each step, tensors are
    limited to the range `[0, 1]`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("i", "v")
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
        reset_mechanism: str = "subtract",
        strict: bool | None = True,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(threshold, spike_grad, learn_threshold, reset_mechanism, strict, **options)
        self.hold_number("alpha", alpha, learn=learn_alpha, at_least=0, at_most=1)
        self.hold_number("beta", beta, learn=learn_beta, at_least=0, at_most=1)

    def dynamics(self, x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, i, v)`."""
        current = self.bounded("alpha", self.alpha, i) * i + x
        r = self.spiked(v)
        h = self.after(self.bounded("beta", self.beta, v) * v + current, r)
        spike = self.fire(h)
        return spike, current, self.kept(h, spike, r)
