"""A network whose layers form a graph without cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class LayerGraph(nn.Module):
    """A network in which the input of each layer is the sum of other layers' outputs.

    Args:
        layers: layers by name. Each layer follows the layers whose outputs it takes.
        sources: for each layer, the names of the layers whose outputs are added to form its input. `""` is the
            network's input.
        output: names of the layers whose outputs are added to form the network's output.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], sources: Mapping[str, Sequence[str]], output: Sequence[str]
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._order = tuple(layers)
        self._sources = {name: tuple(names) for name, names in sources.items()}
        self._output = tuple(output)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, B, ...] -> [T, B, ...]`."""
        values = {"": x}
        for name in self._order:
            values[name] = self.get_submodule(name)(_sum(values, self._sources[name]))
        return _sum(values, self._output)


def _sum(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    first, *others = names
    total = values[first]
    for name in others:
        total = total + values[name]
    return total
