"""The state of a neuron between its calls inside of one `torch.export`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from flexsn_nn._torch_private import tracing_context


class InExport:
    """States after a call. The next call in the same exported program begins with these states.

    The states are in a separate object, because `torch.export` warns of tensors in attributes, lists and dicts of a
    module.

    Args:
        states: states after the call; empty if the object only marks that a call has happened.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)
        trace = tracing_context()
        self._trace = None if trace is None else weakref.ref(trace)

    def is_now(self) -> bool:
        """True if the trace that contained the call is still active, or if no trace was active in the call."""
        return self._trace is None or self._trace() is tracing_context()
