"""Spike counts, which are summed in the step, so that the spikes are not read again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values


class SpikeCounts(Transform):
    """Adds one state: the sum of the first output over time, `[*step]`.

    Compiled kernels keep the sum in a register, and write it once. The gradient of the sum is the gradient of a final
    state, which is not a sequence. At every step, the backward adds this gradient to the gradient of the output.

    Attributes:
        total: sum over the call, `[*step]`. If the call ran without this transform, the total is `None`, and the neuron
            sums its output.
    """

    num_states = 1
    optional = True

    def __init__(self) -> None:
        self.total: Tensor | None = None

    @property
    def key(self) -> Hashable:
        """Key that is equal for all instances."""
        return ()

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Applies the transform if kernels run over a sequence."""
        return call.inputs, self if call.kernels and call.step_mode == "m" else None

    def states(self, call: Call) -> Sequence[Tensor]:
        """Returns zeros, the counts before the first step."""
        x = call.inputs[0]
        return (x.new_zeros((), dtype=count_dtype(x.dtype)).expand(call.step_shape),)

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Adds the first output to the count."""
        (count,) = own.states
        outputs, new_states = core(inputs, states)
        return Changed(outputs, new_states, own_states=(count + outputs[0].to(count.dtype),))

    def ended(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Stores the total."""
        (self.total,) = states


def count_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums over outputs of this dtype: float32, or a wider dtype."""
    return torch.promote_types(dtype, torch.float32)


def per_channel(values: Tensor, *, lead: int) -> Tensor:
    """Sums over all dimensions except the channels, which are a step's second or only dimension.

    Returns `[C]`, or a scalar if the step has no dimension.

    Args:
        values: `[*step]` after `lead` other dimensions.
    """
    step = values.dim() - lead
    channel = lead + min(1, step - 1)
    dims = [d for d in range(values.dim()) if step == 0 or d != channel]
    return values.sum(dims, dtype=count_dtype(values.dtype)) if dims else values.to(count_dtype(values.dtype))
