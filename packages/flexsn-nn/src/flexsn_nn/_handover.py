"""Passes a norm or a delay to the next neuron, whose step computes the norm or the delay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexsn_nn._affine import Producer
from flexsn_nn.errors import HandoverError
from flexsn_nn.transforms._delayed import Delayed


class Handover:
    """Link that passes a layer and the layer's input to the next neuron.

    The layer is the last norm of an `OverTime`, or a `Delay`.

    The layer and the neuron refer to this object instead of each other, so that each module can be copied, moved and
    called separately.
    """

    def __init__(self) -> None:
        self._pair: tuple[Tensor, Producer | Delayed] | None = None

    def give(self, x: Tensor, producer: Producer | Delayed) -> None:
        """Stores the layer and its input for the neuron. Replaces an earlier pair that the neuron did not take."""
        self._pair = x, producer

    def take(
        self, inputs: tuple[Any, ...], affine: Producer | None
    ) -> tuple[tuple[Any, ...], Producer | Delayed | None]:
        """Returns the neuron's inputs and the layer to compute. If no input is stored, returns the arguments.

        Raises:
            HandoverError: the first input is not the stored input, or `affine` is passed although a layer is stored.
        """
        pair, self._pair = self._pair, None
        if pair is None:
            return inputs, affine
        if affine is not None or not inputs or inputs[0] is not pair[0]:
            raise HandoverError(
                "the norm or delay in front of this neuron was fused into it (fuse_norms, fuse_delays), and the neuron "
                "was called with an input that is not that layer's output. Leave this pair out "
                "(fuse_norms(net, skip=...)), or undo it (unfuse_norms(net))."
            )
        return inputs, pair[1]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copies and pickles, which store no input."""
        return {"_pair": None}
