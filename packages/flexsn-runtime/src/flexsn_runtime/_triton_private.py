"""What touches private parts of Triton. Each name is probed when this is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_graph.versions import expect, lacking, needed

_MOST_SPILLS = 256  # numbers of 4 bytes
_COMPILER = "triton.compiler.compiler"
_RESOURCES = ["CompiledKernel", "CompiledKernel._init_handles"]
_LAUNCHER = ["CompiledKernel", "CompiledKernel.function", "CompiledKernel.packed_metadata", "CompiledKernel.run"]
_NO_LAUNCH = "compiled kernels cannot be launched"
_SLOW_LAUNCH = "calls of compiled kernels take longer"
_DRIVER = "triton.runtime.driver"

_short = importlib.util.find_spec("triton") is not None
if _short:

    expect(_DRIVER, ["driver"], _NO_LAUNCH)
    expect("triton", ["knobs"], _NO_LAUNCH)
    expect(_COMPILER, _LAUNCHER, _SLOW_LAUNCH)
    expect(_COMPILER, _RESOURCES, "recurrent steps are launched one by one")
    _short = not lacking(_COMPILER, _LAUNCHER)


def launcher(
    compiled: Any, grid: tuple[int, int, int], numbers: tuple[int, ...], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Launches a compiled kernel, on the current stream of `device`, with the tensors that its function takes.

    Behind them come `numbers`. As `compiled[grid]` does, without what that prepares for the hooks of profilers: half of
    its time. Where there are hooks, it is left to do it, as it is in a version that launches in another way.
    """
    driver = needed(_DRIVER, "driver", _NO_LAUNCH)
    hooks = needed("triton", "knobs.runtime", _NO_LAUNCH)

    usual = compiled[grid]
    current_stream, index = driver.active.get_current_stream, device.index
    if not _short:
        return lambda tensors: usual(*tensors, *numbers, stream=current_stream(index))
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def launch(tensors: Sequence[torch.Tensor]) -> None:
        stream = current_stream(index)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            usual(*tensors, *numbers, stream=stream)
        else:
            run(x, y, z, stream, function, metadata, None, None, None, *tensors, *numbers)

    return launch


def resources(compiled: Any, most: int) -> tuple[int, int] | None:
    """What a compiled kernel uses: registers of a thread, bytes of shared memory of a program.

    `None`: it does not run, because it needs more than `most` bytes, or slower than many launches do, because it keeps
    much of its values in local memory for want of registers.
    """
    shared = int(compiled.metadata.shared)
    if shared > most:
        return None
    compiled._init_handles()
    if compiled.n_spills > _MOST_SPILLS:
        return None
    return int(compiled.n_regs), shared
