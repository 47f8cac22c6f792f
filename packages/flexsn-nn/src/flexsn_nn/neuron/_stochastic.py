"""Leaky integrate and fire with an uncertain threshold."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import check_name
from flexsn_nn.neuron._lif import TAU_HINT, leaky_charge
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions

NOISES = ("logistic", "gaussian")


class StochasticLIF(ImmediateReset):
    """`h = v + (x - (v - v_reset)) / tau`; `s = step(h - v_threshold + scale n)`, `n` noise of each step.

    `LIF` that may fire early or late (escape noise). With logistic noise it fires with probability
    `sigmoid((h - v_threshold) / scale)`.

    A step function draws no random numbers: noise is its second input. `forward(x)` draws it, from PyTorch's global
    generator; `forward(x, noise)` takes yours, zeros for a neuron without noise.

    Args:
        scale: of the noise, at least 0: a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
        noise: `"logistic"` (variance pi² / 3) or `"gaussian"` (variance 1).
        tau, decay_input: as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: as in `ImmediateReset`.

    Raises:
        UnknownNameError: another noise.

    Source: Gerstner et al., "Neuronal dynamics", 2014, chapter 9.1.
    """

    scale: float | Tensor
    noise: str
    tau: float | Tensor
    decay_input: bool

    def __init__(
        self,
        scale: float | Tensor = 0.2,
        noise: str = "logistic",
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, 2, **options)
        self.hold("noise", noise)
        self.hold_number("scale", scale, at_least=0)
        self.hold_number("tau", tau, at_least=1, hint=TAU_HINT)
        self.hold("decay_input", decay_input)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "noise":
            check_name("noise", value, NOISES)
        super().__setattr__(name, value)

    def draw(self, like: Tensor) -> Tensor:
        """Noise of variance as above, in the shape, dtype and device of `like`."""
        if self.noise == "gaussian":
            return torch.randn_like(like)
        uniform = torch.rand_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        return torch.logit(uniform, eps=torch.finfo(uniform.dtype).eps).to(like.dtype)

    def _checked(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
            inputs = (inputs[0], self.draw(inputs[0]))
        return super()._checked(inputs)

    def dynamics(self, x: Tensor, noise: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """One step: `(spike, v)`."""
        h = leaky_charge(x, v, self.bounded("tau", self.tau, v), self.decay_input, self.v_start)
        spike = self.fire(h + self.bounded("scale", self.scale, h) * noise)
        return spike, self.after(h, spike)
