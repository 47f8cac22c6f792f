"""Summary of a network: parameters, shapes, neurons, firing rates and synaptic operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.monitor import RateMonitor, SynapseMonitor, SynapticOperations
from flexsn_nn.reports._layers import first_tensor, forget, layers_of, table, unchanged


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """Summary of one layer.

    Attributes:
        name: name as in `named_modules()`.
        kind: class of the layer.
        parameters: number of elements of the layer's parameters, without parameters that belong to an earlier layer.
        output_shape: shape of the layer's first output; `None` if the layer was not called.
        neurons: number of neurons of the layer, which is the number of elements of one sample's step; 0 for layers that
            are not neurons or were not called.
        rate: spikes per neuron and step; `None` unless the layer is a neuron with a `spike_range`.
        operations: synaptic operations for the whole input; `None` for layers without synapses.
    """

    name: str
    kind: str
    parameters: int
    output_shape: tuple[int, ...] | None
    neurons: int
    rate: float | None
    operations: SynapticOperations | None


@dataclass(frozen=True, slots=True)
class NetworkSummary:
    """Summary of a network for one input. `print` shows it as a table.

    Attributes:
        layers: layers in the order of `named_modules()`.
        parameters: number of elements of all parameters.
        neurons: number of neurons in all layers.
        rate: spikes per neuron and step, averaged over the neurons of all layers that have a `rate`; `None` if no layer
            has a `rate`.
        operations: synaptic operations of all layers.
    """

    layers: tuple[LayerSummary, ...]
    parameters: int
    neurons: int
    rate: float | None
    operations: SynapticOperations

    def __str__(self) -> str:
        header = ("layer", "kind", "output", "parameters", "neurons", "rate", "accumulates", "multiplies")
        rows = [
            (
                layer.name,
                layer.kind,
                "-" if layer.output_shape is None else " x ".join(map(str, layer.output_shape)),
                f"{layer.parameters:,}" if layer.parameters else "-",
                f"{layer.neurons:,}" if layer.neurons else "-",
                "-" if layer.rate is None else f"{layer.rate:.3f}",
                "-" if layer.operations is None else f"{layer.operations.accumulates:,}",
                "-" if layer.operations is None else f"{layer.operations.multiplies:,}",
            )
            for layer in self.layers
        ]
        rate = "" if self.rate is None else f" that fire {self.rate:.3f} times a step"
        verdict = (
            f"{self.parameters:,} parameters; {self.neurons:,} neurons{rate}; {self.operations.accumulates:,} "
            f"accumulates and {self.operations.multiplies:,} multiplies for this input"
        )
        return "\n".join([verdict, *table(header, rows)])


def summarize(net: nn.Module, inputs: Sequence[Any]) -> NetworkSummary:
    """Runs the network once, without gradients, and restores it. Implements `functional.summary`."""
    layers = layers_of(net)
    shapes: dict[str, tuple[int, ...]] = {}

    def remember(name: str) -> Any:
        def hook(layer: nn.Module, inputs_of_layer: Any, output: Any) -> None:
            result = first_tensor(output)
            if result is not None:
                shapes[name] = tuple(result.shape)

        return hook

    with unchanged(net), ExitStack() as stack, torch.no_grad():
        forget(net)
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(remember(name)).remove)
        rates = _start_monitor(stack, RateMonitor, net)
        synapses = _start_monitor(stack, SynapseMonitor, net)
        net(*inputs)
        rate_by_layer = {} if rates is None else rates.rates()
        operations: dict[str, SynapticOperations] = {} if synapses is None else synapses.operations()
    counted_parameters: set[nn.Parameter] = set()
    rows = []
    for name, layer in layers.items():
        new_parameters = [parameter for parameter in layer.parameters() if parameter not in counted_parameters]
        counted_parameters.update(new_parameters)
        is_neuron = isinstance(layer, FlexSN)
        has_spikes = isinstance(layer, FlexSN) and layer.spike_range is not None
        shape = shapes.get(name)
        layer_operations = operations.get(name, operations.get(f"{name}.recurrent"))
        rows.append(
            LayerSummary(
                name,
                type(layer).__name__,
                sum(parameter.numel() for parameter in new_parameters),
                shape,
                _count_neurons(layer, shape) if is_neuron and shape is not None else 0,
                rate_by_layer.get(name) if has_spikes else None,
                layer_operations,
            )
        )
    fired = [(row.rate, row.neurons) for row in rows if row.rate is not None]
    neurons = sum(row.neurons for row in rows)
    spiking = sum(count for _, count in fired)
    return NetworkSummary(
        tuple(rows),
        sum(parameter.numel() for parameter in net.parameters()),
        neurons,
        sum(rate * count for rate, count in fired) / spiking if spiking else None,
        SynapticOperations(
            sum(o.accumulates for o in operations.values()),
            sum(o.multiplies for o in operations.values()),
            sum(o.dense for o in operations.values()),
        ),
    )


def _start_monitor(stack: ExitStack, kind: Any, net: nn.Module) -> Any:
    """Starts a monitor of the network. Returns `None` if the network has no layer that the monitor observes."""
    try:
        return stack.enter_context(kind(net))
    except ParameterError:
        return None


def _count_neurons(layer: nn.Module, shape: tuple[int, ...]) -> int:
    """Returns the number of elements of one sample's step, without the dimensions of time and batch."""
    step = shape[1:] if isinstance(layer, FlexSN) and layer.step_mode == "m" else shape
    return prod(step[1:] if len(step) > 1 else step)
