"""Sequences of different lengths in one batch: after its end, a sequence returns zeros and keeps its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_nn._checks import check_tensor
from flexsn_nn.errors import ParameterError, StepModeError
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values
from flexsn_nn.transforms._where import per_sequence, select


class Lengths(Transform):
    """Ends each sequence of a batch after its own number of steps; `neuron(x, lengths=lengths)` uses this transform.

    After its end, a sequence returns zeros, its states do not change, and no gradient flows to its inputs, even if the
    inputs are not finite. Results are bitwise equal to those of each sequence without padding.

    Args:
        lengths: whole numbers `[B]` from 0 to T. B is the size of a step's first dimension.

    Raises:
        ParameterError: raised at the call: `lengths` have a wrong shape or dtype. On the CPU, also raised if a length
            is out of range. On a GPU, the values are not checked, because reading them would wait for the GPU. Leave
            the lengths on the CPU, so that they are checked.
        StepModeError: raised at the call: the neuron runs single steps.
    """

    num_inputs = 1
    counts_down = True

    def __init__(self, lengths: Tensor) -> None:
        check_tensor("lengths", lengths)
        self.lengths = lengths
        self._cached: tuple[object, Tensor] | None = None

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """Returns the counts of remaining steps, int32 `[T, B, 1, ...]`.

        For kernels, returns the counts at the first step, expanded over time.
        """
        lengths, shape = self.lengths, call.step_shape
        if call.step_mode == "s":
            raise StepModeError(
                "lengths belong to sequences, but this neuron runs single steps (step_mode='s'): leave out the "
                "sequences that have ended, or set step_mode='m'."
            )
        if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype is torch.bool:
            raise ParameterError(f"lengths are {lengths.dtype}; give whole numbers: lengths.long().")
        if lengths.shape != torch.Size(shape[:1]) or not shape:
            raise ParameterError(
                f"lengths have the shape {list(lengths.shape)}, but a step {list(shape)}; give one length for each "
                f"sequence, {list(shape[:1])}. The input is [T, B, ...]: the first dimension is time."
            )
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and len(lengths):
            low, high = (int(bound) for bound in torch.aminmax(lengths))
            if low < 0 or high > call.num_steps:
                raise ParameterError(
                    f"lengths are from {low} to {high}; the input has {call.num_steps} steps: give numbers from 0 to "
                    f"{call.num_steps}."
                )
        if torch.compiler.is_compiling():
            return (self._count_remaining(call),)
        # All neurons of a network share one tensor of counts.
        key = call.num_steps, len(shape), call.inputs[0].device, call.kernels, lengths._version
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._count_remaining(call)
        return (self._cached[1],)

    def _count_remaining(self, call: Call) -> Tensor:
        device = call.inputs[0].device
        first = self.lengths.to(torch.int32).to(device).view(1, -1, *[1] * (len(call.step_shape) - 1))
        if call.kernels:
            return first.expand(call.num_steps, *first.shape[1:])
        steps = torch.arange(call.num_steps, device=device, dtype=torch.int32)
        return first - steps.view(-1, *[1] * (first.dim() - 1))

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Computes the step until a sequence ends, and then returns zeros and unchanged states."""
        (remaining,) = own.inputs
        alive = remaining > 0
        # Zeros replace the padding, so derivatives are finite, and their products with gradients of zero are zero.
        outputs, new_states = core(tuple([select(alive, x, torch.zeros_like(x)) for x in inputs]), states)
        return Changed(
            tuple([select(alive, output, torch.zeros_like(output)) for output in outputs]),
            tuple([select(per_sequence(alive, new), new, old) for new, old in zip(new_states, states, strict=True)]),
        )
