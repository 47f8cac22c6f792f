"""Functions of tensors without gradients, whose calls the compiled launcher repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flexsn_codegen.targets._entry import unwatched
from flexsn_runtime._torch_private import number_of_modes, untraced
from flexsn_runtime.calls._recorded import current, recorded
from flexsn_runtime.native._launcher import compiled_launcher, may_launch
from flexsn_runtime.native._program import NativeProgram, can_be_native
from flexsn_runtime.native._scan import Again, again_of
from flexsn_runtime.operands._operands import layout_key

# After calls with more layouts than this, no further layout is registered. Python executes the calls whose layout is
# not registered.
_MAX_LAYOUTS = 32
# Number of calls of a layout between two checks whether the compiled launcher is loaded. Each check reads the
# environment.
_CALLS_PER_CHECK = 64
_FIRST_RECORDED = 2  # the second call of a layout is the first call that can be recorded


class RepeatedFunction:
    """Runs a function of tensors. For each layout, the compiled launcher runs the calls after a recorded call.

    Args:
        function: function that depends only on its arguments, which are tensors. The function may change some
            of these tensors, and returns tensors.
        alike: True if the tensors of all calls have the same layout, and `may_launch` is True for their device.

    Attributes:
        is_native: True if the compiled launcher runs the calls of at least one layout.
        watched: function that returns True if a hook watches launches. The compiled launcher would not call the hook.
    """

    def __init__(self, function: Callable[[Sequence[Any]], Sequence[Any]], *, alike: bool = False) -> None:
        self._function, self._alike = function, alike
        self._call_counts: Counter[Hashable] = Counter()
        self._calls: Any = None  # the compiled launcher's object for the calls of all layouts
        self._run: Callable[[Sequence[Any]], Sequence[Any] | None] | None = None
        self.is_native = False
        self._module: Any = None
        self._program: Any = None  # program of the layout that was recorded last
        self.watched: Callable[[], bool] = unwatched

    def again(self, tensors: Sequence[Any]) -> Again:
        """Returns a function that runs calls with the layout that was recorded last; see `again_of`.

        Requires that `is_native` is True.
        """
        return again_of(self._module, tensors, program=self._program)

    @property
    def native(self) -> Any:
        """The compiled launcher's object for the recorded calls.

        `None` if no call is recorded, if `alike` is True, or if a hook watches launches.
        """
        return None if self.watched() else self._calls

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Returns the function's results."""
        if self._run is not None and current.recorder is None and not self.watched():
            native_results = self._run(tensors)
            if native_results is not None:
                return native_results
        if (
            number_of_modes()
            or len(self._call_counts) > _MAX_LAYOUTS
            or not (self._alike or may_launch(tensors[0].device))
        ):
            return self._function(tensors)
        layout = None if self._alike else layout_key(tensors)
        self._call_counts[layout] += 1
        is_due = self._call_counts[layout] % _CALLS_PER_CHECK == _FIRST_RECORDED
        module = compiled_launcher(tensors[0].device, self._call_counts.total()) if is_due else None
        if module is None:
            return self._function(tensors)
        results, recording = recorded(self._function, tensors)
        if not isinstance(recording, str) and can_be_native(recording):
            with untraced():  # no dispatch mode records the operations in this block
                program = NativeProgram(module, recording)
                if not self._alike:
                    self._calls = self._calls or module.Calls()
                    self._calls.add(tensors, program.program)
                self.is_native, self._module, self._program = True, module, program.program
                self._run, self.watched = (self._calls or program.program).run, program.watched
        return results
