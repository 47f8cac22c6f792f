"""Access to private parts of Triton. Each name is probed when this module is imported."""

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
    """Resources of a compiled kernel: registers of a thread, bytes of shared memory of a program.

    `None`: it does not run, because it needs more than `most` bytes, or slower than many launches do, because it keeps
    many of its values in local memory when registers run out.
    """
    shared = int(compiled.metadata.shared)
    if shared > most:
        return None
    compiled._init_handles()
    if compiled.n_spills > _MOST_SPILLS:
        return None
    return int(compiled.n_regs), shared
