"""A network as a function of its inputs and its states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_module
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._stateful import Stateful
from flexsn_nn.errors import StateError


class Stateless(nn.Module):
    """A network that takes states as arguments, returns new states, and stores no state: `functional.stateless`.

    Args:
        net: a network. Its parameters and its step mode are shared with this module. Its stored states do not change.

    Attributes:
        net: the network.
    """

    def __init__(self, net: nn.Module) -> None:
        from flexsn_nn.functional import with_state  # imported late, because `functional` uses this class

        super().__init__()
        check_module("net", net)
        self.net = net
        self._layers: tuple[tuple[str, FlexSN | Stateful], ...] = tuple(with_state(net))
        # Number of states by layer. For a layer that is not a neuron, the number is unknown before the first input.
        self._counts = [layer.num_states if isinstance(layer, FlexSN) else None for _, layer in self._layers]

    def initial_states(self, inputs: Tensor | Sequence[Any]) -> list[Tensor]:
        """Computes the initial states of all layers, in the order of `functional.get_states`.

        Runs the network once, without gradients, and restores the network afterwards.

        Args:
            inputs: inputs of the network: one tensor, or several.

        Raises:
            StateError: the network does not call a layer, or your own layer has no `initial_states`.
        """
        from flexsn_nn.reports._layers import forget, unchanged

        states_by_layer: dict[str, list[Tensor]] = {}
        with ExitStack() as stack:
            stack.enter_context(unchanged(self.net))
            forget(self.net)
            for name, layer in self._layers:
                hook = layer.register_forward_pre_hook(_make_hook(states_by_layer, name), with_kwargs=True)
                stack.callback(hook.remove)
            with torch.no_grad():
                self.net(*_to_tuple(inputs))
        missing = [name for name, _ in self._layers if name not in states_by_layer]
        if missing:
            raise StateError(f"the network did not call {missing[0]}: its states are unknown.")
        self._counts = [len(states_by_layer[name]) for name, _ in self._layers]
        return [state for name, _ in self._layers for state in states_by_layer[name]]

    def forward(
        self, inputs: Tensor | Sequence[Any], states: Sequence[Tensor] | None = None
    ) -> tuple[Any, list[Tensor]]:
        """Runs the network from `states`: `output, states = module(inputs, states)`.

        Args:
            inputs: inputs of the network: one tensor, or several.
            states: states from `initial_states` or an earlier call; `None` for the initial states.

        Raises:
            StateError: the number of states differs from the network's, or is unknown before `initial_states` runs.
        """
        initial = self.initial_states(inputs) if states is None else list(states)
        counts = self._count_states(initial)
        before = [_list_results(layer) for _, layer in self._layers]
        try:
            start = 0
            for (_, layer), count in zip(self._layers, counts, strict=True):
                layer.states = initial[start : start + count]
                start += count
                if isinstance(layer, FlexSN):
                    layer._carries = True
            output = self.net(*_to_tuple(inputs))
            return output, [state for _, layer in self._layers for state in layer.states]
        finally:
            for (_, layer), results in zip(self._layers, before, strict=True):
                _restore_results(layer, results)

    def _count_states(self, states: list[Tensor]) -> list[int]:
        counts = [count for count in self._counts if count is not None]
        if len(counts) < len(self._counts):
            raise StateError("a layer that is not a neuron keeps a state: call initial_states(inputs) first.")
        if len(states) != sum(counts):
            raise StateError(f"got {len(states)} states; the network has {sum(counts)}, as returned by initial_states.")
        return counts


def _to_tuple(inputs: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    return (inputs,) if isinstance(inputs, Tensor) or not isinstance(inputs, Iterable) else tuple(inputs)


def _make_hook(states_by_layer: dict[str, list[Tensor]], name: str) -> Any:
    def hook(layer: FlexSN | Stateful, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(layer, FlexSN):
            states_by_layer[name] = [
                state.contiguous() for state in layer._create_initial_states(layer._check_inputs(args))
            ]
        else:
            states_by_layer[name] = layer.initial_states(*args)

    return hook


def _list_results(layer: FlexSN | Stateful) -> tuple[Any, ...]:
    """Returns the results of earlier calls that a layer stores."""
    if isinstance(layer, FlexSN):
        return layer.states, layer.state_seqs, layer.spike_counts
    return (layer._states,)


def _restore_results(layer: FlexSN | Stateful, results: tuple[Any, ...]) -> None:
    if isinstance(layer, FlexSN):
        layer._carries = False
        layer.states, layer.state_seqs, layer.spike_counts = results
    else:
        layer.states = results[0]
