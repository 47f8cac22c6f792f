"""Learned scalars, stored with the shape `[1]`, because torch's `fully_shard` rejects parameters without dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def learned(value: Any, dtype: torch.dtype) -> nn.Parameter:
    """Returns a parameter of at least one dimension, with the initial value `value`, a number or a tensor."""
    return nn.Parameter(torch.atleast_1d(torch.as_tensor(value, dtype=dtype)).detach().clone())


def fit_checkpoint(
    state_dict: dict[str, Any], prefix: str, parameters: Mapping[str, nn.Parameter | None], names: Iterable[str]
) -> None:
    """Reshapes tensors without dimensions in a checkpoint to `[1]`, if the parameters have this shape.

    SpikingJelly, snnTorch and earlier versions of this package save parameters without dimensions.

    Args:
        state_dict: state dict of the checkpoint. This dict is changed in place.
        prefix: prefix of the module in the state dict.
        parameters: parameters of the module.
        names: names of the parameters that may be scalars.
    """
    for name in names:
        key, parameter = prefix + name, parameters.get(name)
        saved = state_dict.get(key)
        if parameter is not None and parameter.shape == (1,) and isinstance(saved, Tensor) and saved.dim() == 0:
            state_dict[key] = saved.reshape(1)


def give_a_dimension(number: nn.Parameter) -> None:
    """Reshapes a parameter without dimensions to `[1]`. The parameter remains the same object for optimizers."""
    if number.dim() == 0:
        gradient, number.grad = number.grad, None
        number.data = number.data.reshape(1)
        number.grad = None if gradient is None else gradient.reshape(1)
