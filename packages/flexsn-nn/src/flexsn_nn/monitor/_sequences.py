"""Records spikes and states over time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.monitor._base import Monitor
from flexsn_nn.neuron import Neuron


class _SequenceMonitor(Monitor):
    """Monitor that stores a sequence for each call, on the neuron's device. Call `clear()` between long runs."""

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        super().__init__(net, layers)
        self._recorded: dict[str, list[Tensor]] = {name: [] for name in self.layers}

    def sequence(self, name: str) -> Tensor:
        """Returns the recorded sequence of a layer, `[T, *step]`, with the steps of all calls since the last `clear()`.

        Raises:
            UnknownNameError: the layer is not monitored.
            ParameterError: no call has been recorded yet.
        """
        check_name("layer", name, self._recorded)
        if not self._recorded[name]:
            raise ParameterError(f"no call of {name!r} was recorded yet: run the network first.")
        return torch.cat(self._recorded[name])

    def _build_table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for name, recorded in self._recorded.items():
            if recorded:
                shape = [sum(len(tensor) for tensor in recorded), *recorded[-1].shape[1:]]
                rows.append([name, type(self.layers[name]).__name__, str(shape)])
        return ["layer", "kind", "recorded"], rows

    def clear(self) -> None:
        """Deletes all records."""
        for recorded in self._recorded.values():
            recorded.clear()


class SpikeMonitor(_SequenceMonitor):
    """Monitor that records the outputs of neurons over time.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with SpikeMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((4, 1), 0.5))
        >>> monitor.sequence("IF").flatten().tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Stores the output of one call."""
        self._recorded[name].append(output if neuron.step_mode == "m" else output.unsqueeze(0))


class StateMonitor(_SequenceMonitor):
    """Monitor that records a state of neurons after every step. Turns `store_state_seqs` on during the recording.

    Args:
        net, layers: same as in `Monitor`.
        state: name of the state, or its index for a `FlexSN` whose states have no names.

    Raises:
        UnknownNameError: a layer does not have the state.
        ParameterError: `state` is a name, and the states of a layer have no names.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with StateMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((3, 1), 0.4))
        >>> [round(v, 1) for v in monitor.sequence("IF").flatten().tolist()]
        [0.4, 0.8, 0.0]
    """

    def __init__(self, net: nn.Module, state: str | int = "v", layers: Iterable[str] | None = None) -> None:
        self._stores = False
        super().__init__(net, layers)
        try:
            self._index = {name: _find_state_index(neuron, state) for name, neuron in self.layers.items()}
        except ValueError:
            self.remove()
            raise
        for neuron in self.layers.values():
            stored, users = _stored.get(neuron, (neuron.store_state_seqs, 0))
            _stored[neuron] = stored, users + 1
            neuron.store_state_seqs = True
        self._stores = True

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Stores the state after each step of one call."""
        index = self._index[name]
        if neuron.step_mode == "m":
            self._recorded[name].append(neuron.state_seqs[index].detach())
        else:
            self._recorded[name].append(neuron.states[index].detach().unsqueeze(0))

    def remove(self) -> None:
        """Stops recording, and restores `store_state_seqs`."""
        super().remove()
        if not self._stores:
            return
        self._stores = False
        for neuron in self.layers.values():
            stored, users = _stored.pop(neuron)
            if users > 1:
                _stored[neuron] = stored, users - 1
            else:
                neuron.store_state_seqs = stored


# For each neuron, the value of `store_state_seqs` before the first monitor, and the number of its monitors.
_stored: weakref.WeakKeyDictionary[FlexSN, tuple[bool, int]] = weakref.WeakKeyDictionary()


def _find_state_index(neuron: FlexSN, state: str | int) -> int:
    if isinstance(state, int):
        check_name("state", str(state), map(str, range(neuron.num_states)))
        return state
    names = neuron.state_names if isinstance(neuron, Neuron) else ()
    if not names:
        raise ParameterError(f"the states of {type(neuron).__name__} have no names: give the index of a state.")
    check_name("state", state, names)
    return names.index(state)
