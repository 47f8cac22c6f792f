"""Several runs in one sequence. After each reset, a run begins with the initial states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_nn._checks import check_tensor
from flexsn_nn.errors import ParameterError
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values
from flexsn_nn.transforms._where import per_sequence, select


class Resets(Transform):
    """Sets the states to their initial values before the marked steps; `neuron(x, resets=mask)` uses this transform.

    Use this transform for sequences that contain several episodes or documents. Gradients do not cross a reset.

    Args:
        resets: booleans `[T, B]`, or `[B]` in step mode `"s"`. B is the size of a step's first dimension.

    Raises:
        ParameterError: raised at the call: `resets` have a wrong shape or dtype.
    """

    num_inputs = 1

    def __init__(self, resets: Tensor) -> None:
        check_tensor("resets", resets)
        self.resets = resets
        self._initial: Values = ()

    @property
    def tensors(self) -> Values:
        """Initial states, if they are not zeros."""
        return self._initial

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Returns the inputs, and a transform with the initial states of this call."""
        transform = Resets(self.resets)
        initial = call.initial_states()
        if initial is not None:
            transform._initial = tuple(initial)
        return call.inputs, transform

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """Returns the mask as `[T, B, 1, ...]`, or `[B, 1, ...]`."""
        resets, shape = self.resets, call.step_shape
        lead = [call.num_steps] if call.step_mode == "m" else []
        if resets.dtype is not torch.bool:
            raise ParameterError(f"resets are {resets.dtype}; give booleans, True before a step that begins again.")
        if not shape or list(resets.shape) != [*lead, shape[0]]:
            raise ParameterError(
                f"resets have the shape {list(resets.shape)}; expected {[*lead, *shape[:1]]} for this input: one "
                f"boolean for each {'step and ' if lead else ''}sequence."
            )
        return (resets.to(call.inputs[0].device).view(*resets.shape, *[1] * (len(shape) - 1)),)

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Computes the step from the initial states where the mask is True, and elsewhere from the current states."""
        (reset,) = own.inputs
        initial = own.tensors or tuple([torch.zeros_like(state) for state in states])
        reset_states = tuple(
            [select(per_sequence(reset, state), new, state) for new, state in zip(initial, states, strict=False)]
        )
        # The states that other transforms have added are not reset.
        return Changed(*core(inputs, (*reset_states, *states[len(reset_states) :])))
