"""What touches private parts of Triton. Each name is probed when this is imported."""

from __future__ import annotations

import importlib.util
from typing import Any

from flexsn_hop.versions import expect

_MOST_SPILLS = 256  # numbers of 4 bytes

if importlib.util.find_spec("triton") is not None:
    expect(
        "triton.compiler.compiler",
        ["CompiledKernel", "CompiledKernel._init_handles"],
        "recurrent steps are launched one by one",
    )


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
