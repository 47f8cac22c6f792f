"""Combines transforms with each other and with a step, into one function and one key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_nn.errors import ParameterError
from flexsn_nn.transforms._transform import Call, Own, Transform, Values


class Counts(NamedTuple):
    """Counts of a step's inputs, states and outputs."""

    inputs: int
    states: int
    outputs: int

    def with_all(self, transforms: Sequence[Transform]) -> Counts:
        """Returns the counts of the step after these transforms have changed the step."""
        if not transforms:
            return self
        return Counts(
            self.inputs + sum(t.num_inputs for t in transforms),
            self.states + sum(t.num_states for t in transforms),
            self.outputs + sum(t.num_outputs for t in transforms),
        )


def compose(
    core: Callable[..., Any], counts: Counts, transforms: Sequence[Transform], tensors: Sequence[Values]
) -> Callable[..., Any]:
    """Applies all transforms to `core`, the first transform innermost: `(*inputs, *states) -> (*outputs, *new_states)`.

    The values that a transform adds are last: its inputs after the other inputs, its states after the other states, and
    its outputs after the other outputs.

    Args:
        core: step function.
        counts: counts of the core's inputs, states and outputs.
        tensors: for each transform, its tensors, or stand-ins for them.
    """
    name: str = getattr(core, "__name__", type(core).__name__)
    for transform, own in zip(transforms, tensors, strict=True):
        step = partial(_run_step, transform, own, counts, core)
        if not torch.compiler.is_compiling():
            step.core = core  # type: ignore[attr-defined]  # gives access to the user's object
            step.__name__ = name  # type: ignore[attr-defined]
        core = step
        counts = counts.with_all([transform])
    return core


def _run_step(
    transform: Transform, tensors: Values, counts: Counts, core: Callable[..., Any], *values: Tensor
) -> tuple[Tensor, ...]:
    num_inputs, num_states, num_outputs = counts
    begin = num_inputs + transform.num_inputs
    end = begin + num_states

    def inner(inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Values, Values]:
        returned = core(*inputs, *states)
        results = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        return results[:num_outputs], results[num_outputs:]

    own = Own(values[num_inputs:begin], values[end:], tensors)
    changed = transform.step(inner, values[:num_inputs], values[begin:end], own)
    if len(changed.own_outputs) != transform.num_outputs or len(changed.own_states) != transform.num_states:
        raise ParameterError(
            f"{type(transform).__name__}.step returned {len(changed.own_outputs)} outputs and "
            f"{len(changed.own_states)} states of its own; its num_outputs is {transform.num_outputs} and its "
            f"num_states {transform.num_states}."
        )
    return *changed.outputs, *changed.own_outputs, *changed.states, *changed.own_states


def check_transforms(transforms: Sequence[Transform]) -> None:
    """Raises `TypeError` unless all arguments are transforms."""
    for i, transform in enumerate(transforms):
        if isinstance(transform, type):
            raise TypeError(f"transforms[{i}] is the class {transform.__name__}; give an instance.")
        if not isinstance(transform, Transform):
            raise TypeError(f"transforms[{i}] is a {type(transform).__name__}; give a flexsn_nn.transforms.Transform.")


def key_of(transforms: Sequence[Transform]) -> Hashable:
    """Returns a key of a combination of transforms. Combinations with equal keys share one trace."""
    return tuple([(type(transform), transform.key) for transform in transforms])


def before(call: Call, transforms: Sequence[Transform]) -> tuple[Values, tuple[Transform, ...]]:
    """Returns the inputs of the step, and the transforms that are part of the step in this call."""
    used_transforms = []
    for transform in transforms:
        inputs, used_transform = transform.before(call)
        call = call._replace(inputs=inputs)
        if used_transform is not None:
            used_transforms.append(used_transform)
    return call.inputs, tuple(used_transforms)


def added(call: Call, transforms: Sequence[Transform], *, at_zero: bool = False) -> tuple[Values, Values]:
    """Collects the inputs and initial states that transforms add.

    Args:
        at_zero: True if all states begin at zero, and the result contains no states.

    Raises:
        ParameterError: the number of inputs or states differs from the transform's `num_inputs` or `num_states`.
    """
    inputs: list[Tensor] = []
    states: list[Tensor] = []
    for transform in transforms:
        kind = type(transform)
        adds = transform.num_inputs or transform.num_states
        if not adds and kind.inputs is Transform.inputs and kind.states is Transform.states:
            continue
        own_inputs = () if kind.inputs is Transform.inputs else tuple(transform.inputs(call))
        own_states = () if at_zero or kind.states is Transform.states else tuple(transform.states(call))
        num_states = 0 if at_zero else transform.num_states
        if len(own_inputs) != transform.num_inputs or len(own_states) != num_states:
            raise ParameterError(
                f"{type(transform).__name__} returned {len(own_inputs)} inputs and {len(own_states)} states; its "
                f"num_inputs is {transform.num_inputs} and its num_states {transform.num_states}."
            )
        inputs += own_inputs
        states += own_states
    return tuple(inputs), tuple(states)


def pass_ends(transforms: Sequence[Transform], outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Passes the added outputs and final states to the transforms that added them.

    Args:
        outputs, states: all added outputs and states, in the order of the transforms.
    """
    outputs, states = list(outputs), list(states)
    for transform in transforms:
        if not transform.num_outputs and not transform.num_states and type(transform).ended is Transform.ended:
            continue
        own_outputs, outputs = outputs[: transform.num_outputs], outputs[transform.num_outputs :]
        own_states, states = states[: transform.num_states], states[transform.num_states :]
        transform.ended(own_outputs, own_states)


class StandIns:
    """Stand-ins for the tensors that a function captures. Kernels read the tensors of a call instead.

    The trace captures the stand-ins. They never change, so the function is traced only once.

    Args:
        like: tensors with the shapes, dtypes and devices of the tensors in later calls.
        learned: for each tensor, True if a gradient may flow to it.
    """

    def __init__(self, like: Sequence[Tensor], learned: Sequence[bool]) -> None:
        self.stand_ins = tuple(
            torch.zeros_like(tensor, memory_format=torch.contiguous_format, requires_grad=flows)
            for tensor, flows in zip(like, learned, strict=True)
        )

    def get_replacements(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the tensors of a call, copied if they are not contiguous, by the ids of their stand-ins."""
        return {id(stand_in): tensor.contiguous() for stand_in, tensor in zip(self.stand_ins, tensors, strict=True)}
