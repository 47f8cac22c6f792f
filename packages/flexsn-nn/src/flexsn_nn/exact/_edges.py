"""Finds direct connections between neurons and layers, without operations in between that could change the values."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn.exact._sources import SAME_FUNCTIONS, SAME_MODULES
from flexsn_nn.fusion._dataflow import forward_graphs

# Functions and methods that do not change their arguments. `SAME_FUNCTIONS` contains the views.
_PURE = frozenset(
    {
        "add", "cat", "div", "dropout", "matmul", "max", "mean", "mul", "neg", "stack", "sub", "sum", "truediv",
        "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "maximum", "minimum",
        "size", "dim", "numel", "stride",
    }
)  # fmt: skip
_SIZES = frozenset({"shape", "ndim", "dtype", "device"})
_INPLACE_ATTRIBUTE = "inplace"


class Edges:
    """Direct connections between neurons and layers, from the graphs of a network in training and in evaluation.

    Attributes:
        writers: names of neurons whose output reaches layers unchanged, and is never read by an operation that could
            change the output in place.
        readers: names of layers that read such an output.
        links: names of neurons, by name of the layer whose output only this neuron reads.
    """

    def __init__(self, net: nn.Module, layers: tuple[type[nn.Module], ...]) -> None:
        self._layers = layers
        self.writers: set[str] = set()
        self.readers: set[str] = set()
        self.links: dict[str, str] = {}
        spoiled_names: set[str] = set()
        connections: list[tuple[str, str]] = []
        for training in (False, True):
            for root, twin, graph in forward_graphs(net, training=training):
                self._read(root, twin, graph, spoiled_names, connections)
        self.writers = {neuron for neuron, _ in connections} - spoiled_names
        self.readers = {layer for neuron, layer in connections if neuron in self.writers}
        self.links = {layer: neuron for layer, neuron in self.links.items() if layer not in spoiled_names}

    def _read(
        self, root: str, net: nn.Module, graph: fx.Graph, spoiled: set[str], connections: list[tuple[str, str]]
    ) -> None:
        prefix = f"{root}." if root else ""
        for node in graph.nodes:
            if node.op != "call_module":
                continue
            name = f"{prefix}{node.target}"
            module = net.get_submodule(name)
            if isinstance(module, FlexSN):
                self._follow(name, node, prefix, net, spoiled, connections, is_root=not root)
            elif type(module) is nn.Linear:
                self._follow_layer(name, node, prefix, net, spoiled)

    def _follow(
        self,
        name: str,
        neuron: fx.Node,
        prefix: str,
        net: nn.Module,
        spoiled: set[str],
        connections: list[tuple[str, str]],
        *,
        is_root: bool,
    ) -> None:
        """Follows the output of a neuron through views to its readers."""
        unvisited, visited = [neuron], set()
        while unvisited:
            value = unvisited.pop()
            for user in value.users:
                if user in visited:
                    continue
                visited.add(user)
                if user.op == "output" and is_root:
                    continue
                module = net.get_submodule(f"{prefix}{user.target}") if user.op == "call_module" else None
                if module is not None and type(module) in SAME_MODULES:
                    unvisited.append(user)
                elif module is not None and not getattr(module, _INPLACE_ATTRIBUTE, False):
                    if type(module) in self._layers:
                        connections.append((name, f"{prefix}{user.target}"))
                elif _find_name(user) in SAME_FUNCTIONS:
                    unvisited.append(user)
                elif _find_name(user) not in _PURE and not _reads_size(user):
                    spoiled.add(name)

    def _follow_layer(self, name: str, layer: fx.Node, prefix: str, net: nn.Module, spoiled: set[str]) -> None:
        users = list(layer.users)
        reader = users[0] if len(users) == 1 else None
        if reader is not None and reader.op == "call_module" and reader.args == (layer,) and not reader.kwargs:
            neuron = f"{prefix}{reader.target}"
            if isinstance(net.get_submodule(neuron), FlexSN) and self.links.setdefault(name, neuron) == neuron:
                return
        spoiled.add(name)


def _find_name(node: fx.Node) -> str:
    """Returns the name of the torch function or the method that a node calls; `""` for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    target: Any = node.target
    owner = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") if owner.startswith("torch") or owner in ("_operator", "") else ""


def _reads_size(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SIZES
