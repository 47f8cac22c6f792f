"""Hooks that observe layers after each of their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from flexsn_nn._checks import check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.functional import neurons


class Watcher(ABC):
    """Base class of observers, which run after each call of a layer, until `remove()` or the end of a `with` block.

    Args:
        found: layers that can be observed, by name.
        layers: names of the layers to observe; `None` for all layers.

    Raises:
        UnknownNameError: `found` has no layer with a name in `layers`.
    """

    def __init__(self, found: Mapping[str, nn.Module], layers: Iterable[str] | None) -> None:
        names = _list_names(found, layers)
        for name in names:
            check_name("layer", name, found)
        self._hooks = [found[name].register_forward_hook(self._make_hook(name), with_kwargs=True) for name in names]

    @abstractmethod
    def clear(self) -> None:
        """Deletes all records."""

    @abstractmethod
    def _build_table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the names of the columns, and a row for each layer, for printing."""

    def __repr__(self) -> str:
        from flexsn_nn.reports._layers import table  # that module imports this one

        header, rows = self._build_table()
        running = "" if self._hooks else ", stopped"
        if not rows:
            return f"{type(self).__name__}: nothing was recorded yet{running}"
        return "\n".join([f"{type(self).__name__}{running}", *table(header, rows)])

    @abstractmethod
    def _observe(self, name: str, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Observes one call of a layer. Runs after each call."""

    def remove(self) -> None:
        """Stops recording. Existing records remain."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _make_hook(self, name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # The input is the first argument, by position or by keyword.
            self._observe(name, layer, (*args, *kwargs.values()), output)

        return hook


def _list_names(available: Mapping[str, nn.Module], layers: Iterable[str] | None) -> list[str]:
    if isinstance(layers, str):
        raise TypeError(f"layers is the string {layers!r}; give a list of names: [{layers!r}].")
    return list(available if layers is None else layers)


class Monitor(Watcher):
    """Base class of observers of neurons, which run after each call, until `remove()` or the end of a `with` block.

    Args:
        net: network or single neuron.
        layers: names of neurons, same as in `net.named_modules()`; `None` for all neurons.

    Attributes:
        layers: the neurons by name.

    Raises:
        UnknownNameError: `net` has no neuron with a name in `layers`.
        ParameterError: `net` has no neuron.
    """

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        all_neurons = dict(neurons(net))
        if not all_neurons:
            raise ParameterError(f"{type(net).__name__} has no FlexSN neuron to monitor.")
        names = _list_names(all_neurons, layers)
        super().__init__(all_neurons, names)
        self.layers: dict[str, FlexSN] = {name: all_neurons[name] for name in names}

    @abstractmethod
    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Records one call of a neuron. Runs after each call.

        Args:
            name: name of the neuron.
            neuron: the neuron.
            output: first output of the call, detached from its graph.
        """

    def _observe(self, name: str, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        self.record(name, layer, first.detach())
