"""Counts synaptic operations. Each use of a weight is one operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_module
from flexsn_nn.errors import ParameterError
from flexsn_nn.functional import neurons
from flexsn_nn.monitor._base import Watcher
from flexsn_nn.neuron import Feedback
from flexsn_nn.neuron._connections import OneToOne

# Layers whose weights are synapses, with the number of dimensions of a layer's input without time. `None` stands for
# any number.
SYNAPTIC: dict[type[nn.Module], int | None] = {
    nn.Linear: None,
    nn.Conv1d: 3,
    nn.Conv2d: 4,
    nn.Conv3d: 5,
    nn.ConvTranspose1d: 3,
    nn.ConvTranspose2d: 4,
    nn.ConvTranspose3d: 5,
}


@dataclass(frozen=True, slots=True)
class SynapticOperations:
    """Numbers of operations with the weights of a layer.

    Attributes:
        accumulates: in all calls whose input consists of zeros and ones, the number of additions of a weight for a
            spike. These additions are the synaptic operations of event-driven hardware.
        multiplies: in all other calls, the number of multiplications by a weight, on hardware that does not skip zeros.
        dense: value that `accumulates` would have if every neuron fired at every step.
    """

    accumulates: int
    multiplies: int
    dense: int

    def energy(self, accumulate: float = 0.9, multiply: float = 4.6) -> float:
        """Computes the energy of the arithmetic in pJ.

        Args:
            accumulate: energy in pJ of an addition in float32.
            multiply: energy in pJ of a multiplication and an addition in float32. The default energies are those of a
                45 nm process (Horowitz, "Computing's energy problem", ISSCC 2014).
        """
        return self.accumulates * accumulate + self.multiplies * multiply


class SynapseMonitor(Watcher):
    """Monitor of the synaptic operations of `nn.Linear`, convolutions and recurrent weights, since the last `clear()`.

    A spike counts as one operation for each weight that it reaches. At the edge of a convolution, a spike reaches fewer
    weights. To count the operations of a convolution, the monitor runs a copy of the layer twice. Only `operations()`
    and `total()` wait for the device. Biases and products of two activations (attention) are not counted. Spikes of a
    recurrent neuron (`Recurrent`, `RLIF`, …) reach its recurrent weights one step later. All spikes of a call are
    counted, under the name `NAME.recurrent`. Layers inside of your own step function are not counted.

    Args:
        net: network or single layer.
        layers: names of layers, same as in `net.named_modules()`; `None` for all layers of these kinds.

    Raises:
        UnknownNameError: `net` has no layer of these kinds with a name in `layers`.
        ParameterError: `net` has no layer of these kinds.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> with SynapseMonitor(net) as monitor:
        ...     _ = net(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # one spike, three weights
        >>> monitor.operations()
        {'0': SynapticOperations(accumulates=3, multiplies=0, dense=12)}
    """

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        check_module("net", net)
        kinds = tuple(SYNAPTIC)
        synaptic_layers: dict[str, nn.Module] = {}
        # Layers inside of a neuron's step are excluded, because they are called when the step is traced, and not at
        # each step.
        inner_modules = {part for _, neuron in neurons(net) for part in neuron.modules()}
        for name, module in net.named_modules():
            if isinstance(module, kinds) and module not in inner_modules:
                synaptic_layers[name or type(module).__name__] = module
            elif isinstance(module, Feedback) and isinstance(module.recurrent, (*kinds, OneToOne)):
                synaptic_layers[f"{name}.recurrent" if name else "recurrent"] = module
        if not synaptic_layers:
            raise ParameterError(f"{type(net).__name__} has no linear layer and no convolution.")
        super().__init__(synaptic_layers, layers)
        self._counts: dict[str, Tensor] = {}  # for each layer, the numbers `accumulates`, `multiplies` and `dense`

    def operations(self) -> dict[str, SynapticOperations]:
        """Returns the operations of each layer that has run."""
        return {name: SynapticOperations(*counts.tolist()) for name, counts in self._counts.items()}

    def total(self) -> SynapticOperations:
        """Returns the sums of the operations of all layers."""
        each = self.operations().values()
        return SynapticOperations(
            sum(o.accumulates for o in each), sum(o.multiplies for o in each), sum(o.dense for o in each)
        )

    def _build_table(self) -> tuple[list[str], list[list[str]]]:
        operations = self.operations().items()
        rows = [
            [name, str(counts.accumulates), str(counts.multiplies), str(counts.dense)] for name, counts in operations
        ]
        return ["layer", "accumulates", "multiplies", "dense"], rows

    def clear(self) -> None:
        """Sets all counts to zero."""
        self._counts.clear()

    def _observe(self, name: str, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            x = (output if isinstance(layer, Feedback) else inputs[0]).detach()
            if isinstance(layer, Feedback):
                layer = layer.recurrent
            binary = ((x == 0) | (x == 1)).all()
            uses = count_uses(layer, (x != 0).float())
            dense_uses = count_uses(layer, torch.ones_like(x, dtype=torch.float32))
            zero = torch.zeros_like(uses)
            counts = torch.stack([torch.where(binary, uses, zero), torch.where(binary, zero, dense_uses), dense_uses])
        previous_counts = self._counts.get(name)
        self._counts[name] = counts if previous_counts is None else previous_counts + counts


def count_uses(layer: nn.Module, x: Tensor) -> Tensor:
    """Counts the uses of weights for an input of zeros and ones. Returns a scalar integer tensor."""
    if isinstance(layer, nn.Linear):
        return x.count_nonzero() * layer.out_features
    if isinstance(layer, OneToOne):
        return x.count_nonzero()
    kind = next(kind for kind in SYNAPTIC if isinstance(layer, kind))
    dims = SYNAPTIC[kind]
    assert dims is not None
    # The layer runs with weights of 1 and without bias. Each output is then the number of its weights that are
    # multiplied by an input of 1.
    twin: Any = kind.__new__(kind)
    weight: Any = layer.weight
    ones = nn.Parameter(torch.ones_like(weight, dtype=torch.float32), requires_grad=False)
    twin.__dict__.update(layer.__dict__)
    twin.__dict__["_parameters"] = {"weight": ones, "bias": None}
    weights_per_output: Tensor = twin.forward(x.flatten(0, -dims) if x.dim() > dims else x)
    # Some convolution algorithms compute in another basis, with small errors, so the result is rounded.
    return weights_per_output.round().sum(dtype=torch.float64).long()
