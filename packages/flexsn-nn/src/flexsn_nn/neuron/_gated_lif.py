"""Gated leaky integrate and fire."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_count, check_number
from flexsn_nn.errors import ParameterError, StepModeError
from flexsn_nn.neuron._base import Neuron, RunOptions, fit
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, spike_range_of, with_strictness


class GatedLIF(Neuron):
    """`v' = keep (1 - gamma s) v - (1 - alpha) leak + x (1 - beta (1 - conduct[t])) - (1 - gamma) v_sub s`.

    `s' = step(v' - v_threshold)` and `keep = 1 - alpha (1 - tau)`. The learned gates `alpha`, `beta` and `gamma`
    control the leak, the weight of the input, and the reset. `alpha`, `beta`, `gamma`, `tau`, `leak`, `v_sub`,
    `v_threshold` and `conduct` are sigmoids of the learned parameters with these names.

    Args:
        T: number of steps. Each step has its own `conduct`. `None` for one `conduct` and any number of steps.
        inplane: number of channels C of inputs `[T, B, C, H, W]`. Each channel has its own parameters; `None` for
            parameters that all channels share.
        init_linear_decay: initial value of `leak`, in (0, 1); `None` for `init_v_threshold / (2 T)`, which needs `T`.
        init_v_subreset: initial value of `v_sub`, in (0, 1); `None` for `init_v_threshold`.
        init_tau, init_v_threshold, init_conduct: initial values of `tau`, `v_threshold` and `conduct`, in (0, 1).
        surrogate_function, strict: same as in `ImmediateReset`.
        options: same as in `Neuron`.

    The initial value of each gate is the sigmoid of a random number in [-0.1, 0.1], from PyTorch's global generator.

    Source: Yao et al., "GLIF: a unified gated leaky integrate-and-fire neuron", NeurIPS 2022.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "s")
    alpha: nn.Parameter
    beta: nn.Parameter
    gamma: nn.Parameter
    tau: nn.Parameter
    leak: nn.Parameter
    v_sub: nn.Parameter
    v_threshold: nn.Parameter
    conduct: nn.Parameter
    T: int | None
    surrogate_function: SpikeFunction

    def __init__(
        self,
        T: int | None = None,
        inplane: int | None = None,
        init_linear_decay: float | None = None,
        init_v_subreset: float | None = None,
        init_tau: float = 0.25,
        init_v_threshold: float = 0.5,
        init_conduct: float = 0.5,
        surrogate_function: SpikeFunction = SIGMOID,
        strict: bool | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(num_inputs=2, **options)
        for name, count in {"T": T, "inplane": inplane}.items():
            if count is not None:
                check_count(name, count)
        if T is not None and self.step_mode == "s":
            raise StepModeError("T gives each step its own conduct and needs step_mode='m'; leave T=None.")
        if init_linear_decay is None:
            if T is None:
                raise ParameterError("give init_linear_decay, or T for the default init_v_threshold / (2 T).")
            init_linear_decay = init_v_threshold / (2 * T)
        initial_values = {
            "tau": init_tau,
            "leak": init_linear_decay,
            "v_sub": init_v_threshold if init_v_subreset is None else init_v_subreset,
            "v_threshold": init_v_threshold,
        }
        channels = (1,) if inplane is None else (inplane, 1, 1)
        for gate in ("alpha", "beta", "gamma"):
            self.hold(gate, 0.2 * (torch.rand(channels) - 0.5), learn=True)
        for name, initial_value in initial_values.items():
            self.hold(name, _invert_sigmoid(name, initial_value, channels), learn=True)
        # The first dimension of `conduct` is T. Unlike the other parameters, `conduct` does not broadcast to the step.
        conduct_shape = (T or 1,) if inplane is None else (T or 1, *channels)
        self.conduct = nn.Parameter(_invert_sigmoid("conduct", init_conduct, conduct_shape))
        self.hold("T", T)
        self.hold("surrogate_function", with_strictness("surrogate_function", surrogate_function, strict))

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the input, and `conduct` of each step as the core's second input."""
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            return super()._check_inputs(inputs)  # raises the error for these inputs
        x = inputs[0]
        conduct = torch.sigmoid(self.conduct).to(x.dtype)
        if self.step_mode == "s":
            if self.T is not None:
                raise StepModeError("T gives each step its own conduct and needs step_mode='m'; leave T=None.")
            return super()._check_inputs((x, conduct[0]))
        if self.T is not None and x.shape[0] != self.T:
            raise ParameterError(f"the input has {x.shape[0]} steps; the neuron was created for T={self.T}.")
        return super()._check_inputs((x, conduct.expand(x.shape[0], *conduct.shape[1:])))

    def dynamics(self, x: Tensor, conduct: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, spike)`."""
        alpha, beta, gamma, tau, leak, v_sub, v_threshold = (
            fit(torch.sigmoid(p), v)
            for p in (self.alpha, self.beta, self.gamma, self.tau, self.leak, self.v_sub, self.v_threshold)
        )
        weighted = x * (1 - beta * (1 - conduct))
        keep = 1 - alpha * (1 - tau)
        charged = keep * v - (1 - alpha) * leak + weighted
        h = charged - keep * v * gamma * s - (1 - gamma) * v_sub * s
        spike = self.surrogate_function(h - v_threshold)
        return spike, h, spike

    def _own_spike_range(self) -> tuple[int, int] | None:
        return spike_range_of(self, self.surrogate_function)


def _invert_sigmoid(name: str, value: float, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor whose sigmoid is `value`."""
    check_number(name, value, above=0, below=1, hint="It is the sigmoid of the learned parameter.")
    return torch.full(shape, -math.log(1 / value - 1))
