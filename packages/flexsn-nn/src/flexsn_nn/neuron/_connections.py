"""Recurrent connections from the spikes of a step to the next step: a matrix, a convolution, or a weight per neuron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn._checks import check_count, check_function, check_number
from flexsn_nn._numbers import fit_checkpoint, learned
from flexsn_nn.errors import InputShapeError, ParameterError
from flexsn_nn.neuron._base import fit

Initialize = Callable[[Tensor], object]


class AllToAll(nn.Linear):
    """Computes `V s + b`, with weights `[features, features]` that connect every neuron to all neurons.

    The last dimension of `s` contains the neurons. The product is computed in the dtype of `s`, so that a float32
    matrix does not widen a half-precision state.
    """

    def forward(self, s: Tensor) -> Tensor:
        """Maps `[..., features] -> [..., features]`."""
        bias = None if self.bias is None else self.bias.to(s.dtype)
        return F.linear(s, self.weight.to(s.dtype), bias)

    def check(self, step: Sequence[int]) -> None:
        """Raises `InputShapeError` unless the step has `in_features` neurons."""
        num_neurons = step[-1] if len(step) else 1
        if num_neurons != self.in_features:
            raise InputShapeError(
                f"the step has shape {list(step)}, with {num_neurons} neurons in the last dimension; the recurrent "
                f"weights are for {self.in_features} neurons."
            )


class OneToOne(nn.Module):
    """Computes `V s`: connects every neuron to itself.

    Args:
        V: a number, or a tensor that broadcasts to the step.
        learn: True if a gradient flows to `V`.
    """

    V: nn.Parameter

    def __init__(self, V: float | Tensor, *, learn: bool = True) -> None:
        super().__init__()
        check_number("V", V)
        dtype = V.dtype if isinstance(V, Tensor) else torch.get_default_dtype()
        self.V = V if isinstance(V, nn.Parameter) else learned(V, dtype)
        self.V.requires_grad_(learn)

    def forward(self, s: Tensor) -> Tensor:
        """Maps `[*step] -> [*step]`."""
        return s * fit(self.V, s)

    def check(self, step: Sequence[int]) -> None:
        """Raises `InputShapeError` unless `V` broadcasts to the step."""
        shape = self.V.shape
        fits = self.V.numel() == 1 or (
            len(shape) <= len(step) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(step), strict=False))
        )
        if not fits:
            raise InputShapeError(
                f"the step has shape {list(step)}; V, of shape {list(shape)}, does not broadcast to it."
            )

    def extra_repr(self) -> str:
        return f"V={list(self.V.shape)}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_checkpoint(state_dict, prefix, self._parameters, ["V"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Convolved(nn.Conv2d):
    """Computes `V * s + b`: a convolution of odd size. Padding with zeros keeps the shape of the step.

    The result is computed in the dtype of `s`. Compiled kernels do not support convolutions, so use `backend="torch"`.
    """

    def forward(self, s: Tensor) -> Tensor:
        """Maps `[B, C, H, W] -> [B, C, H, W]`."""
        bias = None if self.bias is None else self.bias.to(s.dtype)
        convolved: Tensor = self._conv_forward(s, self.weight.to(s.dtype), bias)
        return convolved

    def check(self, step: Sequence[int]) -> None:
        """Raises `InputShapeError` unless the step is `[B, C, H, W]` with `in_channels` channels."""
        if len(step) != 4 or step[1] != self.in_channels:
            raise InputShapeError(
                f"the step has shape {list(step)}; the recurrent convolution takes [B, {self.in_channels}, H, W]."
            )


def connection(
    features: int | None,
    all_to_all: bool,
    V: float | Tensor,
    bias: bool,
    learn_recurrent: bool,
    init: Initialize | None,
) -> nn.Module:
    """Returns an `AllToAll` or a `OneToOne`. The arguments are those of `Recurrent`.

    Raises:
        ParameterError: `features` is missing, or arguments exclude each other.
    """
    if init is not None:
        check_function("init", init, "torch.nn.init.orthogonal_")
    if features is not None:
        check_count("features", features)
    module: AllToAll | OneToOne
    if all_to_all:
        if features is None:
            raise ParameterError(
                "features is missing: give the number of neurons, the size of the input's last dimension. To connect "
                "each neuron only to itself, set all_to_all=False."
            )
        if isinstance(V, Tensor) or V != 1:
            raise ParameterError(
                "V is the weight from each neuron to itself, for all_to_all=False. To set the initial matrix, use "
                "init=lambda weight: weight.copy_(V)."
            )
        module = AllToAll(features, features, bias)
        weight: Tensor = module.weight
    else:
        if bias:
            raise ParameterError("bias=True needs all_to_all=True; weights from each neuron to itself have no bias.")
        if features is not None and (not isinstance(V, Tensor) or V.numel() == 1):
            V = torch.as_tensor(V, dtype=torch.get_default_dtype()).detach().expand(features)
        module = OneToOne(V)
        weight = module.V
    return _initialize(module, weight, learn_recurrent, init)


def convolution(
    channels: int, kernel_size: int | tuple[int, int], bias: bool, learn_recurrent: bool, init: Initialize | None
) -> nn.Module:
    """Returns a `Convolved` with `channels` channels, and with the padding that keeps the step's shape."""
    check_count("conv2d_channels", channels)
    sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
    for size in sizes:
        check_count("kernel_size", size)
    if len(sizes) != 2 or any(size % 2 == 0 for size in sizes):
        raise ParameterError(f"kernel_size is {kernel_size}; give odd sizes, so that the step keeps its shape.")
    module = Convolved(channels, channels, sizes, padding=(sizes[0] // 2, sizes[1] // 2), bias=bias)
    return _initialize(module, module.weight, learn_recurrent, init)


def _initialize(module: nn.Module, weight: Tensor, learn: bool, init: Initialize | None) -> nn.Module:
    if init is not None:
        with torch.no_grad():
            init(weight)
    for parameter in module.parameters():
        parameter.requires_grad_(learn)
    return module
