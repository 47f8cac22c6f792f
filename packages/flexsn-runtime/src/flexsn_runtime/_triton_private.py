"""What touches private parts of Triton. Seen working on Triton 3.6; 3.7 has the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def launcher(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """Launches a compiled kernel, on the current stream of `device`, with the arguments of its function.

    As `compiled[grid]` does, without what that prepares for the hooks of profilers: half of its time. Where there are
    hooks, it is left to do it.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    usual = compiled[grid]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream, index, hooks = driver.active.get_current_stream, device.index, knobs.runtime
    x, y, z = grid

    def launch(*arguments: Any) -> None:
        stream = current_stream(index)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            usual(*arguments, stream=stream)
        else:
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return launch
