"""Access to private parts of Triton. Importing this module probes each name."""

from __future__ import annotations

import importlib.util
from typing import Any

from flexsn_hop.versions import expect

_MOST_SPILLS = 256  # in values of 4 bytes

if importlib.util.find_spec("triton") is not None:
    expect(
        "triton.compiler.compiler",
        ["CompiledKernel", "CompiledKernel._init_handles"],
        "recurrent steps are launched one by one",
    )


def resources(compiled: Any, most: int) -> tuple[int, int] | None:
    """Resources of a compiled kernel: registers per thread, and bytes of shared memory per program.

    Returns `None` if the kernel cannot run because it needs more than `most` bytes of shared memory. Also returns
    `None` if the kernel spills many values to local memory, since a series of launches is then faster.
    """
    shared = int(compiled.metadata.shared)
    if shared > most:
        return None
    compiled._init_handles()
    if compiled.n_spills > _MOST_SPILLS:
        return None
    return int(compiled.n_regs), shared
