"""Leaky integrate and fire with a refractory period after each spike."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class RefractoryLIF(LIF):
    """`h = v + (x - (v - v_reset)) / tau`, but `h = v` while `r > relative`.

    `r' = absolute + relative` after a spike, and `r' = max(r - 1, 0)` otherwise. The neuron is a `LIF` with a counter
    `r` of refractory steps. For `absolute` steps after a spike, the neuron ignores its input and is silent. In the next
    `relative` steps, the threshold is `v_threshold + rise r / relative`: it begins at `v_threshold + rise`, and falls
    linearly to `v_threshold`. The soft reset subtracts the current threshold.

    Args:
        absolute: number of silent steps after a spike, at least 0.
        relative: number of steps with an increased threshold after the silent steps, at least 0.
        rise: initial increase of the threshold, at least 0.
        tau, decay_input: same as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    `absolute`, `relative` and `rise` are numbers or tensors that broadcast to the step; `rise` may also be an
    `nn.Parameter`. No gradient flows from the counter to the spikes.

    Raises:
        ParameterError: `rise` is given without `relative`.

    Source: Gerstner et al., "Neuronal dynamics", 2014, chapter 1.3, with a threshold that falls linearly.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "r")
    absolute: float | Tensor
    relative: float | Tensor
    rise: float | Tensor

    def __init__(
        self,
        absolute: float | Tensor = 2.0,
        relative: float | Tensor = 0.0,
        rise: float | Tensor = 0.0,
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("absolute", absolute, at_least=0)
        self.hold_number("relative", relative, at_least=0)
        self.hold_number("rise", rise, at_least=0)
        has_rise = isinstance(rise, Tensor) or rise > 0
        if has_rise and not bool((torch.as_tensor(relative) > 0).all()):
            raise ParameterError("rise increases the threshold for relative steps: give relative above 0.")
        self._has_rise = has_rise

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, r)`."""
        v, r = states
        relative, absolute = self.bounded("relative", self.relative, r), self.bounded("absolute", self.absolute, r)
        is_ready = (r <= relative).to(v.dtype)
        h = is_ready * self.charge(x, v) + (1 - is_ready) * v
        threshold = fit(self.v_threshold, v)
        if self._has_rise:
            # While `r` is above `relative`, the neuron is silent at any threshold.
            threshold = threshold + self.bounded("rise", self.rise, v) * (r / relative)
        spike = is_ready * self.fire(h, threshold)
        fired = (spike.detach() > 0).to(r.dtype)
        # In all versions of torch, the gradient of `relu` at 0 is 0. The gradient of `clamp` at 0 depends on the
        # version.
        new_r = fired * (absolute + relative) + (1 - fired) * torch.relu(r - 1)
        return spike, self.after(h, spike, threshold), new_r
