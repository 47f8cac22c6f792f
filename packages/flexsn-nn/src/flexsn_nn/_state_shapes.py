"""Shapes of a step's states, and errors for states with other shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexsn_nn._torch_private import after_transforms
from flexsn_nn.errors import StateError
from flexsn_runtime import ShapeError


def step_shape(inputs: Sequence[Tensor], step_mode: str) -> tuple[int, ...]:
    """Returns the shape to which the steps of the inputs broadcast.

    Args:
        inputs: `[T, *step]` each in step mode `"m"`, `[*step]` in `"s"`.

    Raises:
        ShapeError: the steps do not broadcast.
    """
    if len(inputs) == 1:
        return inputs[0].shape[1:] if step_mode == "m" else inputs[0].shape
    shapes = [tuple(x.shape[1:] if step_mode == "m" else x.shape) for x in inputs]
    if all(shape == shapes[0] for shape in shapes):  # not a set, because hashing would make symbols concrete
        return shapes[0]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ShapeError(
            f"the inputs' steps have the shapes {', '.join(str(list(s)) for s in sorted(set(shapes)))}, which do "
            "not broadcast to one: give all of them the shape of the step, or sizes of 1."
        ) from None


def plain_states(states: Sequence[Tensor]) -> list[Tensor]:
    """Unwraps states that were wrapped by transforms of `torch.func` that have ended.

    Raises:
        StateError: a state belongs to one sample of a `vmap` that has ended.
    """
    unwrapped_states = []
    for i, state in enumerate(states):
        plain_state = after_transforms(state) if isinstance(state, Tensor) else state
        if plain_state is None:
            raise StateError(
                f"state {i} belongs to one sample of a torch.func.vmap that has ended. Call reset() before the "
                "call, or return the states from the function: neuron.step(x, states)."
            )
        unwrapped_states.append(plain_state)
    return unwrapped_states


def check_states(
    states: Sequence[Tensor],
    step: Sequence[int],
    device: torch.device,
    shapes_of: Callable[[], Sequence[Sequence[int]]],
) -> None:
    """Raises an error unless the states match the inputs.

    Args:
        step: shape of the inputs' step. Most states have this shape, too.
        device: device of the inputs.
        shapes_of: function that returns the expected shapes of the states. This function is only called if the shape of
            a state differs from `step`, or its device from `device`.

    Raises:
        TypeError: a state is not a tensor.
        StateError: a state has another shape, or is on another device.
    """
    shapes: Sequence[Sequence[int]] | None = None
    for i, state in enumerate(states):
        if not isinstance(state, Tensor):
            raise TypeError(f"state {i} is a {type(state).__name__}; a neuron takes tensors.")
        if state.shape != step or state.device != device:
            shapes = shapes_of() if shapes is None else shapes
            if state.shape == torch.Size(shapes[i]) and state.device == device:
                continue
            remedy = (
                "Call reset() between batches, or pass matching states. If one instance is in two places of a "
                "network, give each place its own instance."
            )
            if state.shape == torch.Size(shapes[i]):
                remedy = "Move the neuron and its state (neuron.to(device)) or the input, or call reset()."
            elif state.dim() != len(shapes[i]):
                remedy += " If the states have other shapes than the step, override init_states() to return them."
            raise StateError(
                f"state {i} has shape {list(state.shape)} on {state.device}; for this input it has "
                f"{list(shapes[i])} on {device}. {remedy}"
            )
