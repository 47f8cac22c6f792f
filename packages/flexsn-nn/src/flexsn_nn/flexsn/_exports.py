"""The state of a neuron from call to call inside of one `torch.export`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from flexsn_nn._torch_private import tracing_context


class InExport:
    """The states that a call leaves for the next one of the same program.

    An object of its own, since `torch.export` warns of tensors in the attributes, lists and dicts of a module.

    Args:
        states: after the call.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)
        trace = tracing_context()
        self._trace = None if trace is None else weakref.ref(trace)

    def is_now(self) -> bool:
        """True in the trace in which the call was."""
        return self._trace is None or self._trace() is tracing_context()
