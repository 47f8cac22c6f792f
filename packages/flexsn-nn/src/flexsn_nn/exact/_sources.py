"""Reads the network's `forward`, without data, to find layers whose input consists of spikes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._over_time import OverTime
from flexsn_nn.fusion._dataflow import forward_graphs
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory._ranges import WholeRange

_InputRanges = dict[str, list[WholeRange | None]]

# Modules, functions and methods whose results contain only elements of the first argument, and zeros.
SAME_MODULES = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.UpsamplingNearest2d, nn.PixelShuffle, nn.PixelUnshuffle,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
SAME_FUNCTIONS = frozenset(
    {
        "clone", "contiguous", "detach", "expand", "flatten", "flip", "index_select", "movedim", "narrow", "permute",
        "repeat", "reshape", "select", "squeeze", "swapaxes", "transpose", "unflatten", "unsqueeze", "view",
    }
)  # fmt: skip
_SUMS = frozenset({"add", "iadd", "add_"})
_CHOICES = frozenset({"maximum", "minimum"})


def known_inputs(net: nn.Module, layers: tuple[type[nn.Module], ...], *, training: bool) -> dict[str, WholeRange]:
    """Finds the layers whose inputs, in all calls, are whole numbers such as spikes. Returns ranges by layer name.

    Args:
        layers: types of the layers.
        training: True to read the graphs of training, False for those of evaluation.
    """
    input_ranges: _InputRanges = {}
    for root, twin, graph in forward_graphs(net, training=training):
        _Reader(root, twin, layers, input_ranges).read(graph)
    return {
        name: WholeRange(
            min(input_range.low for input_range in ranges), max(input_range.high for input_range in ranges)
        )
        for name, inputs in input_ranges.items()
        if len(ranges := [input_range for input_range in inputs if input_range is not None]) == len(inputs)
    }


def _find_neuron_range(neuron: FlexSN | NormNeuron) -> WholeRange | None:
    inner = neuron.neuron if isinstance(neuron, NormNeuron) else neuron
    low_high = inner.spike_range if inner.num_outputs == 1 else None
    return None if low_high is None else WholeRange(*low_high)


class _Reader:
    """Computes the ranges of the values in the graph of a part of a network."""

    def __init__(
        self, root: str, net: nn.Module, layers: tuple[type[nn.Module], ...], input_ranges: _InputRanges
    ) -> None:
        self._prefix = f"{root}." if root else ""
        self._net, self._layers, self._input_ranges = net, layers, input_ranges
        self._names = {module: name for name, module in net.named_modules()}

    def read(self, graph: fx.Graph) -> None:
        ranges: dict[fx.Node, WholeRange | None] = {}
        for node in graph.nodes:
            arguments = [ranges.get(argument) if isinstance(argument, fx.Node) else argument for argument in node.args]
            ranges[node] = self._find_node_range(node, arguments)

    def _find_node_range(self, node: fx.Node, arguments: Sequence[Any]) -> WholeRange | None:
        first = arguments[0] if arguments else None
        if node.op == "call_module":
            module = self._net.get_submodule(f"{self._prefix}{node.target}")
            return self._find_module_range(module, first if isinstance(first, WholeRange) else None)
        if node.op == "call_method":
            return self._find_function_range(str(node.target), node, arguments)
        if node.op == "call_function":
            target: Any = node.target
            owner = getattr(target, "__module__", None) or ""
            if owner.startswith("torch") or target in (operator.add, operator.iadd) or owner in ("_operator", ""):
                return self._find_function_range(getattr(target, "__name__", ""), node, arguments)
        return None

    def _find_module_range(self, module: nn.Module, before: WholeRange | None) -> WholeRange | None:
        name = self._names[module]
        if isinstance(module, self._layers):
            self._input_ranges.setdefault(name, []).append(before)
        if isinstance(module, FlexSN | NormNeuron):
            return _find_neuron_range(module)
        if type(module) in (OverTime, nn.Sequential):
            for child in module.children():
                before = self._find_module_range(child, before)
            return before
        if type(module) in SAME_MODULES or (type(module) in _DROPOUTS and not module.training):
            return None if before is None else WholeRange(min(before.low, 0), max(before.high, 0))
        return None

    def _find_function_range(self, name: str, node: fx.Node, arguments: Sequence[Any]) -> WholeRange | None:
        if name in SAME_FUNCTIONS:
            return arguments[0] if arguments and isinstance(arguments[0], WholeRange) else None
        if node.kwargs or len(arguments) != 2 or not all(isinstance(argument, WholeRange) for argument in arguments):
            return None
        a, b = arguments
        if name in _SUMS:
            return WholeRange(a.low + b.low, a.high + b.high)
        if name in _CHOICES:
            return WholeRange(min(a.low, b.low), max(a.high, b.high))
        return None
