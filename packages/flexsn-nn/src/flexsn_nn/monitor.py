"""Monitors: what the neurons of a network do while it runs, recorded by forward hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.functional import neurons
from flexsn_nn.neuron import Neuron

__all__ = ["Monitor", "RateMonitor", "SpikeMonitor", "StateMonitor"]


class Monitor(ABC):
    """Looks at neurons after each of their calls, until `remove()` or the end of a `with` block.

    Args:
        net: a network, or one neuron.
        layers: names of neurons as in `net.named_modules()`; `None`: all of them.

    Attributes:
        layers: the neurons by name.

    Raises:
        UnknownNameError: a layer that is no neuron of `net`.
        ParameterError: `net` has no neuron.
    """

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        found = dict(neurons(net))
        if not found:
            raise ParameterError(f"{type(net).__name__} has no FlexSN neuron to monitor.")
        names = list(found if layers is None else layers)
        for name in names:
            check_name("layer", name, found)
        self.layers: dict[str, FlexSN] = {name: found[name] for name in names}
        self._hooks = [
            neuron.register_forward_hook(self._hook(name)) for name, neuron in self.layers.items()
        ]

    @abstractmethod
    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Called after each call of a neuron, with its (first) output, detached."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets what was recorded."""

    def remove(self) -> None:
        """Stops recording; what was recorded stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _hook(self, name: str) -> Any:
        def hook(neuron: FlexSN, inputs: Any, output: Tensor | list[Tensor]) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            self.record(name, neuron, first.detach())

        return hook


class RateMonitor(Monitor):
    """Firing rates: spikes per neuron and step, over all calls since the last `clear()`.

    Keeps one number per layer on its device; only `rates()` waits for it.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with RateMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((4, 1), 0.5))
        >>> monitor.rates()
        {'IF': 0.5}
    """

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        super().__init__(net, layers)
        self._spikes: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Adds the spikes of one call."""
        spikes = output.sum(dtype=torch.promote_types(output.dtype, torch.float32))
        before = self._spikes.get(name)
        self._spikes[name] = spikes if before is None else before + spikes
        self._counts[name] = self._counts.get(name, 0) + output.numel()

    def rates(self) -> dict[str, float]:
        """The mean output of each layer that has run."""
        return {name: float(spikes) / max(self._counts[name], 1) for name, spikes in self._spikes.items()}

    def clear(self) -> None:
        """Starts again at zero."""
        self._spikes.clear()
        self._counts.clear()


class _SequenceMonitor(Monitor):
    """Keeps a sequence per call; on the neuron's device, so `clear()` it between long runs."""

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        super().__init__(net, layers)
        self._kept: dict[str, list[Tensor]] = {name: [] for name in self.layers}

    def sequence(self, name: str) -> Tensor:
        """Everything recorded of a layer, `[T of all calls together, *step]`.

        Raises:
            UnknownNameError: a layer that is not monitored.
            ParameterError: nothing was recorded yet.
        """
        check_name("layer", name, self._kept)
        if not self._kept[name]:
            raise ParameterError(f"nothing was recorded of {name!r} yet: run the network first.")
        return torch.cat(self._kept[name])

    def clear(self) -> None:
        """Forgets what was recorded."""
        for kept in self._kept.values():
            kept.clear()


class SpikeMonitor(_SequenceMonitor):
    """Outputs of neurons over time.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with SpikeMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((4, 1), 0.5))
        >>> monitor.sequence("IF").flatten().tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Keeps the output of one call."""
        self._kept[name].append(output if neuron.step_mode == "m" else output.unsqueeze(0))


class StateMonitor(_SequenceMonitor):
    """A state of neurons after every step. Turns `store_state_seqs` on while it records.

    Args:
        net, layers: as in `Monitor`.
        state: its name, or, for a `FlexSN` whose states have no names, its number.

    Raises:
        UnknownNameError: a state that a layer does not have.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with StateMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((3, 1), 0.4))
        >>> [round(v, 1) for v in monitor.sequence("IF").flatten().tolist()]
        [0.4, 0.8, 0.0]
    """

    def __init__(self, net: nn.Module, state: str | int = "v", layers: Iterable[str] | None = None) -> None:
        super().__init__(net, layers)
        try:
            self._index = {name: _state_index(neuron, state) for name, neuron in self.layers.items()}
        except ValueError:
            self.remove()
            raise
        self._stored = {name: neuron.store_state_seqs for name, neuron in self.layers.items()}
        for neuron in self.layers.values():
            neuron.store_state_seqs = True

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Keeps the states of one call."""
        index = self._index[name]
        if neuron.step_mode == "m":
            self._kept[name].append(neuron.state_seqs[index].detach())
        else:
            self._kept[name].append(neuron.states[index].detach().unsqueeze(0))

    def remove(self) -> None:
        """Stops recording, and sets `store_state_seqs` back."""
        super().remove()
        for name, stored in getattr(self, "_stored", {}).items():
            self.layers[name].store_state_seqs = stored


def _state_index(neuron: FlexSN, state: str | int) -> int:
    if isinstance(state, int):
        check_name("state", str(state), map(str, range(neuron.num_states)))
        return state
    names = neuron.state_names if isinstance(neuron, Neuron) else ()
    if not names:
        raise ParameterError(f"the states of {type(neuron).__name__} have no names: give a number.")
    check_name("state", state, names)
    return names.index(state)
