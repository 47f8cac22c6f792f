"""Leaky integrate and fire with a random threshold."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import check_name
from flexsn_nn.neuron._lif import TAU_HINT, leaky_charge
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions
from flexsn_nn.noise._numbers import draw_all
from flexsn_nn.random import normal_like, uniform_like
from flexsn_nn.transforms._transform import Changed, Core, Own, Transform, Values

NOISES = ("logistic", "gaussian")


def _to_logistic(uniform: Tensor) -> Tensor:
    return torch.logit(uniform, eps=torch.finfo(uniform.dtype).eps)


class EscapeNoise(Transform):
    """Draws the noise that a step takes as its second input.

    Args:
        noise: argument of `StochasticLIF`.
    """

    def __init__(self, noise: str) -> None:
        self.noise = noise

    @property
    def key(self) -> Hashable:
        """Key of a trace with this noise."""
        return self.noise

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Computes one step with noise in the shape and dtype of the last state."""
        v = states[-1]
        if self.noise == "gaussian":
            noise = normal_like(v)
        else:
            noise = _to_logistic(uniform_like(v.to(torch.promote_types(v.dtype, torch.float32)))).to(v.dtype)
        return Changed(*core((inputs[0], noise, *inputs[2:]), states))


def _needs_noise(inputs: tuple[Tensor, ...]) -> bool:
    return len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point()


class StochasticLIF(ImmediateReset):
    """`h = v + (x - (v - v_reset)) / tau`; `s = step(h - v_threshold + scale n)`, with noise `n` in each step.

    The neuron is a `LIF` that may fire early or late (escape noise). With logistic noise, the neuron fires with the
    probability `sigmoid((h - v_threshold) / scale)`.

    `forward(x)` draws the noise inside of the step, with `flexsn_nn.random`. `forward(x, noise)` uses your noise, for
    example zeros.

    Args:
        scale: scale of the noise, at least 0: a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
        noise: `"logistic"` (variance pi² / 3) or `"gaussian"` (variance 1).
        tau, decay_input: same as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Raises:
        UnknownNameError: `noise` is unknown.

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
        """Draws the noise that a call from the initial state uses, with the shape, dtype and device of `like`."""
        is_single_step = self.step_mode == "s"
        shape, steps = (like.shape, None) if is_single_step else (like.shape[1:], like.shape[0])
        if self.noise == "gaussian":
            return draw_all(self._numbers, shape, steps, like.device, bits=None).to(like.dtype)
        return _to_logistic(draw_all(self._numbers, shape, steps, like.device, bits=24)).to(like.dtype)

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if _needs_noise(inputs):  # adds an input that `EscapeNoise` replaces
            lead = inputs[0].shape[:1] if self.step_mode == "m" else ()
            ones = [1] * (inputs[0].dim() - len(lead))
            inputs = inputs[0], inputs[0].detach().new_zeros(()).expand(*lead, *ones)
        return super()._check_inputs(inputs)

    def _list_completing_transforms(self, inputs: tuple[Tensor, ...]) -> tuple[Transform, ...]:
        return (EscapeNoise(self.noise),) if _needs_noise(inputs) else ()

    def dynamics(self, x: Tensor, noise: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        h = leaky_charge(x, v, self.bounded("tau", self.tau, v), self.decay_input, self.v_start)
        spike = self.fire(h + self.bounded("scale", self.scale, h) * noise)
        return spike, self.after(h, spike)
