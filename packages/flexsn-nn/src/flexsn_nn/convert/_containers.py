"""`Recurrent` layers that replace SpikingJelly's recurrent containers, and take over their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn._affine import Producer
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.flexsn._options import StepChanges
from flexsn_nn.neuron import Recurrent, RunOptions


class Concatenated(nn.Module):
    """Weights of a `LinearRecurrentContainer`, applied to the input and to the last output separately.

    The first columns of `rc.weight` multiply the input, and the other columns multiply the last output.

    Args:
        rc: linear layer that maps the concatenated input `x` and last output `y` to the input of `layers`.
        layers: linear layers between `rc` and the neuron.
    """

    rc: nn.Linear

    def __init__(self, rc: nn.Linear, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.rc = rc
        self.layers = nn.ModuleList(layers)
        self.split = rc.out_features

    def of_input(self, x: Tensor) -> Tensor:
        """Computes the input's part of the neuron's current, for all steps at once, with the biases."""
        current = F.linear(x, self.rc.weight[:, : self.split], self.rc.bias)
        for layer in self.layers:
            current = layer(current)
        return current

    def forward(self, s: Tensor) -> Tensor:
        """Computes the last output's part of the neuron's current, without the biases."""
        current = F.linear(s, self.rc.weight[:, self.split :])
        for layer in self.layers:
            current = F.linear(current, layer.weight)  # type: ignore[arg-type]
        return current


class LinearRecurrent(Recurrent):
    """SpikingJelly's `LinearRecurrentContainer` of linear layers and a neuron."""

    recurrent: Concatenated

    def __init__(self, neuron: FlexSN, weights: Concatenated, **options: Unpack[RunOptions]) -> None:
        super().__init__(neuron, recurrent=weights, **options)

    def forward(self, *inputs: Tensor, affine: Producer | None = None, **options: Unpack[StepChanges]) -> Tensor:
        """Runs the layer: `[T, N, *, in_features] -> [T, N, *, out_features]`; without `T` in step mode `"s"`."""
        return super().forward(*self._compute_currents(inputs, affine), **options)

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        *,
        affine: Producer | None = None,
        **options: Unpack[StepChanges],
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the layer from `states`; see `Recurrent.step`."""
        sequences = (inputs,) if isinstance(inputs, Tensor) else inputs
        return super().step(self._compute_currents(sequences, affine), states, **options)

    def _compute_currents(self, inputs: Sequence[Tensor], affine: Producer | None) -> list[Tensor]:
        return [self.recurrent.of_input(x if affine is None else affine.of(x)) for x in inputs]


class ElementWiseRecurrent(Recurrent):
    """SpikingJelly's `ElementWiseRecurrentContainer` of a neuron, whose input is `element_wise_function(y, x)`."""

    element_wise_function: Callable[..., Any]

    def __init__(
        self, neuron: FlexSN, element_wise_function: Callable[..., Any], **options: Unpack[RunOptions]
    ) -> None:
        super().__init__(neuron, recurrent=nn.Identity(), **options)
        self.element_wise_function = element_wise_function

    def driven(self, x: Tensor, s: Tensor) -> Tensor:
        """Computes the neuron's input from the layer's input `x` and the last output `s`."""
        driven: Tensor = self.element_wise_function(s, x)
        return driven
