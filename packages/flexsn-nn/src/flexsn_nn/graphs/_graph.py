"""A recorded step: its memory, and the tensors that a replay stores on the network's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._stateful import Stateful
from flexsn_nn.functional import with_state
from flexsn_nn.graphs._arguments import copies_of, copy_all, copy_of, put_together

# Attributes that hold a call's tensors, for neurons and for other layers with a state.
_ATTRIBUTES = {FlexSN: ("states", "state_seqs", "spike_counts"), Stateful: ("_states",)}


def _list_attributes(module: FlexSN | Stateful) -> tuple[str, ...]:
    return _ATTRIBUTES[FlexSN if isinstance(module, FlexSN) else Stateful]


def _to_list(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


class LeftTensors:
    """Tensors that a step has stored on layers, and the attributes that hold these tensors.

    Args:
        net: the network.
    """

    def __init__(self, net: nn.Module) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = [
            (module.__dict__, attribute, module.__dict__[attribute])
            for _, module in with_state(net)
            for attribute in _list_attributes(module)
        ]

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of all layers."""
        return [tensor for _, _, value in self._values for tensor in _to_list(value)]

    def put(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Stores `tensors` on the layers. By default, restores the tensors with which this object was created."""
        remaining = iter(self.tensors() if tensors is None else tensors)
        for attributes, attribute, value in self._values:
            if isinstance(value, Tensor):
                attributes[attribute] = next(remaining)
            else:
                attributes[attribute] = value if value is None else [next(remaining) for _ in value]
            if "_graph" in attributes:
                attributes["_graph"] = None


def states_of(net: nn.Module) -> list[Tensor]:
    """Returns the states that a network's layers hold."""
    return [state for _, module in with_state(net) for state in module.states]


@dataclass(slots=True)
class Graph:
    """A recorded step.

    Attributes:
        replay: function that repeats the step.
        arguments, states: memory that a replay reads.
        results, form: tensors of the step's result, and form of the result.
        stored: tensors that the step stored on the layers.
        parameters, gradients: parameters, and the gradient of each; `None` for a parameter without a gradient.
    """

    replay: Callable[[], None]
    arguments: Sequence[Tensor]
    states: Sequence[Tensor]
    results: Sequence[Tensor]
    form: Any
    stored: LeftTensors
    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor | None]

    def run(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> Any:
        """Repeats the step with other arguments and initial states. Returns a copy of the result."""
        copy_all((*self.arguments, *self.states), (*arguments, *states))
        self.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        results = copies_of((*self.results, *self.stored.tensors()))
        count = len(self.results)
        self.stored.put(results[count:])
        return put_together(self.form, iter(results[:count]))


def record(
    recorder: Any,
    run: Callable[[tuple[Any, ...]], tuple[Sequence[Tensor], Any]],
    net: nn.Module,
    arguments: Any,
    parameters: Sequence[nn.Parameter],
    *,
    carry: bool,
) -> Graph:
    """Records a step, and restores the network afterwards.

    Args:
        recorder: a `GraphRecorder`.
        run: function that runs the step. This function takes the arguments, and returns the tensors and the form of its
            result.
        arguments: `CallArguments`, whose tensors are copied.
        parameters: parameters whose gradients the step computes.
        carry: True if the step begins with the current states of the layers.
    """
    before = LeftTensors(net)
    gradients = [parameter.grad for parameter in parameters]
    static = arguments.like()
    states = [copy_of(state.detach()) for state in states_of(net)] if carry else []
    try:
        if carry:
            _set_states(net, states)
        replay, (results, form) = recorder.record(lambda: run(arguments.put_together(static)))
        recorded_gradients = [parameter.grad for parameter in parameters]
        stored = LeftTensors(net)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        before.put()
    return Graph(replay, static, states, results, form, stored, parameters, recorded_gradients)


def _set_states(net: nn.Module, states: Sequence[Tensor]) -> None:
    remaining = iter(states)
    for _, module in with_state(net):
        attribute = _list_attributes(module)[0]
        module.__dict__[attribute] = [next(remaining) for _ in module.states]
