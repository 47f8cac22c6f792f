"""Parallel spiking neurons, which replace the recurrence by a matrix product over time. Spikes do not reset `h`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_count, check_device, check_number, check_tensor
from flexsn_nn._leaf import Leaf
from flexsn_nn._numbers import fit_checkpoint, learned
from flexsn_nn._stateful import Stateful, check_floating, check_stored_state, is_own_forward
from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._reset import ATAN, SpikeFunction, surrogate_spike_range


class PSN(Leaf):
    """`h[t] = Σ_i weight[t, i] x[i] + bias[t]`; `s = step(h)`. Each step reads all steps, even later steps.

    The neuron is not a scan, but a single matrix product over time.

    Args:
        T: number of steps of every input.
        surrogate_function: function that computes spikes from `h`.

    Attributes:
        weight, bias: learned parameters, `[T, T]` and `[T, 1]`. The initial `bias` is -1.

    Source: Fang et al., "Parallel spiking neurons with high efficiency and ability to learn long-term dependencies",
    NeurIPS 2023.
    """

    steps_apart: ClassVar[bool] = False

    def __init__(self, T: int, surrogate_function: SpikeFunction = ATAN) -> None:
        super().__init__()
        check_count("T", T)
        self.T = T
        self.surrogate_function = surrogate_function
        self.weight = nn.Parameter(torch.empty(T, T))
        self.bias = nn.Parameter(torch.full((T, 1), -1.0))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @property
    def spike_range(self) -> tuple[int, int] | None:
        """Range of the output, same as in `FlexSN`."""
        return surrogate_spike_range(self.surrogate_function) if is_own_forward(self) else None

    def weights(self) -> Tensor:
        """Returns the matrix that multiplies the input, `[T, T]`."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, *step]` to spikes `[T, *step]`.

        Raises:
            ParameterError: the number of steps is not `T`.
            InputDtypeError: the input is not a floating-point tensor.
        """
        check_floating(type(self).__name__, x)
        check_device("weight", self.weight, x)
        if x.dim() < 1 or x.shape[0] != self.T:
            raise ParameterError(f"the input has shape {list(x.shape)}; the neuron was created for T={self.T} steps.")
        h = torch.addmm(self.bias, self.weights(), x.flatten(1))
        return self.surrogate_function(h).view(x.shape)

    def extra_repr(self) -> str:
        return f"T={self.T}"


class MaskedPSN(PSN):
    """`h[t] = Σ_i m[t, i] weight[t, i] x[i] + bias[t]`; `s = step(h)`; `m` is 1 for the last `k` steps.

    For all other steps, `m` is `1 - lambda_`. The neuron is a `PSN` that becomes causal if you increase `lambda_` from
    0 to 1 during training.

    Args:
        k: number of steps that each step reads if `lambda_` is 1: the step itself and the `k - 1` steps before it.
        T: number of steps of every input.
        lambda_init: initial value of `lambda_`, in `[0, 1]`.
        surrogate_function: function that computes spikes from `h`.

    Attributes:
        lambda_: strength of the mask, a buffer. To set the strength, assign a number: `neuron.lambda_ = 0.5`.

    Source: see `PSN`.
    """

    _lambda_: Tensor
    mask: Tensor

    def __init__(self, k: int, T: int, lambda_init: float = 0.0, surrogate_function: SpikeFunction = ATAN) -> None:
        super().__init__(T, surrogate_function)
        check_count("k", k)
        check_number("lambda_init", lambda_init, at_least=0, at_most=1)
        self.k = k
        self.register_buffer("_lambda_", torch.as_tensor(float(lambda_init)))
        ones = torch.ones(T, T)
        self.register_buffer("mask", torch.tril(ones) * torch.triu(ones, -(k - 1)), persistent=False)

    @property
    def lambda_(self) -> Tensor:
        """Strength of the mask, in `[0, 1]`. With 1, the neuron is causal."""
        return self._lambda_

    @lambda_.setter
    def lambda_(self, value: float) -> None:
        check_number("lambda_", value, at_least=0, at_most=1)
        self._lambda_.fill_(value)

    def weights(self) -> Tensor:
        """Returns the masked weights, `[T, T]`."""
        return (self._lambda_ * self.mask + (1 - self._lambda_)) * self.weight

    def extra_repr(self) -> str:
        return f"k={self.k}, T={self.T}, lambda_={self._lambda_.item():.4g}"


class SlidingPSN(Stateful):
    """`h[t] = Σ_{j < k} weight[k - 1 - j] x[t - j] + bias`; `s = step(h)`: one window that slides over time.

    The neuron is causal and accepts any number of steps. It keeps the last `k - 1` inputs from call to call until
    `reset()`. Inputs before the first step are zeros.

    Args:
        k: number of steps in the window, including the current step.
        exp_init: True for initial weights 1, 1/2, 1/4, … from the current step back in time, False for random initial
            weights.
        surrogate_function: function that computes spikes from `h`.
        step_mode: `"m"` for `[T, *step]`, `"s"` for `[*step]`.

    Attributes:
        weight, bias: learned parameters, `[k]` and `[1]`. The initial `bias` is -1.

    Source: see `PSN`.
    """

    def __init__(
        self, k: int, exp_init: bool = True, surrogate_function: SpikeFunction = ATAN, step_mode: str = "m"
    ) -> None:
        super().__init__(step_mode)
        check_count("k", k)
        self.k = k
        self.surrogate_function = surrogate_function
        weight = 0.5 ** torch.arange(k - 1, -1, -1.0)
        if not exp_init:
            weight = torch.empty(1, k)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            weight = weight[0]
        self.weight = nn.Parameter(weight)
        self.bias = learned(-1.0, torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, *step]` to spikes `[T, *step]`, or `[*step]` to spikes `[*step]`.

        Raises:
            StateError: the stored inputs have another shape, dtype or device.
            InputDtypeError: the input is not a floating-point tensor.
        """
        check_floating("SlidingPSN", x)
        check_tensor("the input", x, dims=1 if self.step_mode == "m" else 0)
        check_device("weight", self.weight, x)
        new = x if self.step_mode == "m" else x.unsqueeze(0)
        window = self._prepend_history(new)
        num_earlier = len(window) - len(new)
        if self.step_mode == "s":
            h = (self.weight[self.k - len(window) :].unsqueeze(-1) * window.flatten(1)).sum(0) + self.bias
        else:
            h = torch.addmm(self.bias, self._build_matrix(len(new), num_earlier), window.flatten(1))
        if self.k > 1:
            self.states = [window[-(self.k - 1) :]]
        return self.surrogate_function(h.view(x.shape))

    @property
    def spike_range(self) -> tuple[int, int] | None:
        """Range of the output, same as in `FlexSN`."""
        return surrogate_spike_range(self.surrogate_function) if is_own_forward(self) else None

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """Returns zeros `[k - 1, *step]`, the inputs before the first step; an empty list if `k` is 1."""
        step = x.shape[1:] if self.step_mode == "m" else x.shape
        return [x.new_zeros((self.k - 1, *step))] if self.k > 1 else []

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_checkpoint(state_dict, prefix, self._parameters, ["bias"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _prepend_history(self, new: Tensor) -> Tensor:
        if self.k == 1 or not self.states:
            return new
        (history,) = self.states
        shape = torch.Size((min(len(history), self.k - 1), *new.shape[1:]))
        check_stored_state("the window of earlier inputs", history, shape, new)
        return torch.cat([history, new])

    def _build_matrix(self, steps: int, num_earlier: int) -> Tensor:
        """Returns `[steps, num_earlier + steps]`. Row `t` has the weights of the last `k` inputs up to step `t`."""
        age = torch.arange(steps, device=self.weight.device).unsqueeze(1) + num_earlier
        age = age - torch.arange(num_earlier + steps, device=self.weight.device)
        is_in_window = (age >= 0) & (age < self.k)
        return torch.where(is_in_window, self.weight[(self.k - 1 - age).clamp(0, self.k - 1)], 0.0)

    def extra_repr(self) -> str:
        return f"k={self.k}, step_mode={self.step_mode!r}"
