"""A parametrization that keeps the weight of a layer on a grid for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flexsn_nn._checks import check_count
from flexsn_nn.errors import ParameterError
from flexsn_nn.exact._grid import exponents, round_to_grid

FEWEST_BITS, MOST_BITS = 8, 16
_BIAS = "bias"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class Gridded:
    """Record of a tensor that was rounded to a grid.

    Attributes:
        name: name of the tensor.
        bits: number of bits of its whole numbers, sign included.
        largest_change: largest change of an element by the rounding.
        relative_change: largest change, divided by the largest element.
    """

    name: str
    bits: int
    largest_change: float
    relative_change: float

    def __str__(self) -> str:
        return (
            f"{self.name} on a grid of {self.bits} bits: elements change by at most {self.largest_change:.1e}, "
            f"{self.relative_change:.1e} of the largest element"
        )


class OnGrid(nn.Module):
    """Rounds a tensor to the grid of each row. The gradient passes unchanged. `on_grid` registers this module.

    Args:
        module: layer whose weight determines the grid.
        name: name of the layer's weight.
        bits: number of bits of the weight's whole numbers, sign included.
        largest_input: largest magnitude of the layer's input.
    """

    def __init__(self, module: nn.Module, name: str, bits: int, largest_input: int) -> None:
        super().__init__()
        self.bits, self.largest_input = bits, largest_input
        # The layer is in a list, so that it does not become a submodule of its own parametrization.
        self._layer, self._name = [module], name

    def forward(self, values: Tensor) -> Tensor:
        """Returns the weight `[rows, ...]` or the bias `[rows]` on the grid."""
        weight, bias = (_read_original(self._layer[0], name) for name in (self._name, _BIAS))
        assert weight is not None
        with torch.no_grad():
            e = exponents(weight, self.bits, self.largest_input, bias, rounding=True)
            is_bias = values.dim() == 1
            grid_values = round_to_grid(values, e.flatten() if is_bias else e, None if is_bias else self.bits)
            # A value is close to its rounded value. Therefore, the difference between the two is exact, and the sum is
            # exact.
            difference = grid_values - values
        return values + difference

    def extra_repr(self) -> str:
        return f"bits={self.bits}, largest_input={self.largest_input}"


def on_grid(module: nn.Module, name: str = "weight", bits: int = 16, *, largest_input: int = 1) -> tuple[Gridded, ...]:
    """Keeps each row of a layer's weight on a grid, so that sums over spikes are exact. Changes the layer in place.

    The numbers of a row become multiples of a power of two, `2 ** -e`. The power is the smallest for which the
    multipliers are whole numbers of `bits` bits, and float32 can represent all sums of a row exactly. A product with
    spikes then has the same bits in any order of summation: in the loop and in kernels, for any batch size, on any
    device. If the layer has a `bias`, the bias is rounded to the same grid. The grid is a `torch.nn.utils.parametrize`
    parametrization: the learned values are not rounded, the gradient passes straight through, and
    `remove_parametrizations(module, name)` leaves the weight on its grid.

    Args:
        module: linear layer, convolution, or `recurrent` module of a recurrent layer.
        name: name of the weight, `[outputs, ...]` float32.
        bits: number of bits of each whole number, sign included: 8 to 16.
        largest_input: largest magnitude of the whole numbers by which the layer multiplies: 1 for spikes, 40 for a sum
            of 40 spikes.

    Returns:
        A record of the weight, and of the bias if the layer has a bias, with the changes that the rounding makes.

    Raises:
        ParameterError: the tensor does not exist, has no rows, is not float32, or is already on a grid; or `bits` or
            `largest_input` is out of range.

    Example:
        >>> layer = nn.Linear(64, 10)
        >>> weight, bias = on_grid(layer)
        >>> weight.relative_change < 1e-4
        True
        >>> list(layer.state_dict())
        ['parametrizations.weight.original', 'parametrizations.bias.original']
    """
    check_count("bits", bits, at_least=FEWEST_BITS)
    if bits > MOST_BITS:
        raise ParameterError(f"bits is {bits}; a grid has {FEWEST_BITS} to {MOST_BITS} bits.")
    check_count("largest_input", largest_input)
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or name not in {
        *module._parameters,
        *module._buffers,
        *_list_parametrized_names(module),
    }:
        raise ParameterError(f"{type(module).__name__} has no parameter or buffer {name!r}.")
    if grid_of(module, name) is not None:
        raise ParameterError(f"{name} of {type(module).__name__} is on a grid: call remove_parametrizations first.")
    if isinstance(module, _TRANSPOSED):
        raise ParameterError(
            f"{type(module).__name__} sums over the first dimension of its weight, so the weight has no rows."
        )
    if weight.dim() < 2:
        raise ParameterError(f"{name} is {list(weight.shape)}; a weight with rows is [outputs, inputs, ...].")
    if weight.dtype != torch.float32:
        raise ParameterError(f"{name} is {weight.dtype}; a grid needs float32.")
    records = []
    names = [name] if name == _BIAS or _count_rows(module, _BIAS) != weight.shape[0] else [name, _BIAS]
    before = {tensor_name: getattr(module, tensor_name).detach().clone() for tensor_name in names}
    for tensor_name in names:
        parametrize.register_parametrization(module, tensor_name, OnGrid(module, name, bits, largest_input))
    for tensor_name in names:
        change = (getattr(module, tensor_name).detach() - before[tensor_name]).abs()
        largest_change, largest_value = (
            float(t.amax()) if t.numel() else 0.0 for t in (change, before[tensor_name].abs())
        )
        records.append(
            Gridded(tensor_name, bits, largest_change, largest_change / largest_value if largest_value else 0.0)
        )
    return tuple(records)


def grid_of(module: nn.Module, name: str = "weight") -> OnGrid | None:
    """Returns the grid of a tensor if it is the last parametrization of the tensor, otherwise `None`."""
    if name not in _list_parametrized_names(module):
        return None
    last = list(module.parametrizations[name])[-1]  # type: ignore[index]
    return last if isinstance(last, OnGrid) else None


def _list_parametrized_names(module: nn.Module) -> set[str]:
    """Returns the names of a module's parametrized tensors."""
    parametrizations = module._modules.get("parametrizations")
    return set(parametrizations.keys()) if isinstance(parametrizations, nn.ModuleDict) else set()


def _count_rows(module: nn.Module, name: str) -> int | None:
    tensor = getattr(module, name, None)
    return len(tensor) if isinstance(tensor, Tensor) and tensor.dim() == 1 else None


def _read_original(module: nn.Module, name: str) -> Tensor | None:
    """Returns the values of a tensor before rounding to the grid; `None` if the layer does not have the tensor."""
    if name not in _list_parametrized_names(module):
        tensor = getattr(module, name, None)
        return tensor if isinstance(tensor, Tensor) else None
    chain: Any = module.parametrizations[name]  # type: ignore[index]
    value: Tensor = chain.original
    for parametrization in chain:
        if isinstance(parametrization, OnGrid):
            break
        value = parametrization(value)
    return value
