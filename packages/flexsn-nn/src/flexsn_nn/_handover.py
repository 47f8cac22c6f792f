"""How a layer leaves its norm or its delay to the neuron after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexsn_nn._affine import Producer
from flexsn_nn.errors import HandoverError
from flexsn_nn.transforms._delayed import Delayed


class Handover:
    """Hands input and layer from an `OverTime` whose last layer is a norm, or from a `Delay`, to the neuron after it.

    Both hold it, and neither holds the other, so that each can be copied, moved and called alone.
    """

    def __init__(self) -> None:
        self._given: tuple[Tensor, Producer | Delayed] | None = None

    def give(self, x: Tensor, producer: Producer | Delayed) -> None:
        """Leaves an input and its producer for the neuron; drops an earlier pair that the neuron did not take."""
        self._given = x, producer

    def take(
        self, inputs: tuple[Any, ...], affine: Producer | None
    ) -> tuple[tuple[Any, ...], Producer | Delayed | None]:
        """The neuron's inputs and what is in front of them; as they are if nothing was given.

        Raises:
            HandoverError: something was given, and the first input is something else.
        """
        given, self._given = self._given, None
        if given is None:
            return inputs, affine
        if affine is not None or not inputs or inputs[0] is not given[0]:
            raise HandoverError(
                "the norm or delay in front of this neuron was fused into it (fuse_norms, fuse_delays), and the neuron "
                "was called with something else than what that layer returned. Leave this pair out "
                "(fuse_norms(net, skip=...)), or undo it (unfuse_norms(net))."
            )
        return inputs, given[1]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is empty."""
        return {"_given": None}
