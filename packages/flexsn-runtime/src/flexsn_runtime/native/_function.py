"""A function of tensors, without gradients, that the compiled launcher repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from flexsn_runtime._torch_private import number_of_modes, untraced
from flexsn_runtime.calls._recorded import current, recorded
from flexsn_runtime.native._launcher import compiled_launcher, may_launch
from flexsn_runtime.native._program import NativeProgram, can_be_told
from flexsn_runtime.operands._operands import layout_key

# Layouts that are told; calls of others stay with Python.
_MOST = 32
# Calls of a layout between polls for the compiled launcher, each of which reads the environment.
_ASKED_EVERY = 64
_RECORDED = 2  # the call that is recorded


class RepeatedFunction:
    """Runs a function of tensors, and has the compiled launcher repeat its calls, by the tensors' layouts.

    Args:
        function: computes with nothing but its tensors, of which it may change some. Its results are tensors.
    """

    def __init__(self, function: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]) -> None:
        self._function = function
        self._times: Counter[Hashable] = Counter()
        self._told: Any = None  # the launcher's calls
        self._watched: Callable[[], bool] | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The results."""
        if self._watched is not None and current.recorder is None and not self._watched():
            found: Sequence[Tensor] | None = self._told.run(tensors)
            if found is not None:
                return found
        first = tensors[0]
        assert first is not None
        if number_of_modes() or len(self._times) > _MOST or not may_launch(first.device):
            return self._function(tensors)
        layout = layout_key(tensors)
        self._times[layout] += 1
        is_due = self._times[layout] % _ASKED_EVERY == _RECORDED
        module = compiled_launcher(first.device, sum(self._times.values())) if is_due else None
        if module is None:
            return self._function(tensors)
        results, recording = recorded(self._function, tensors)
        if not isinstance(recording, str) and can_be_told(recording):
            with untraced():  # no mode has to see it
                program = NativeProgram(module, recording)
                self._told = self._told or module.Calls()
                self._told.add(tensors, program.told)
                self._watched = program.watched
        return results
