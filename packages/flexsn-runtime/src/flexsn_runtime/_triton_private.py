"""Access to private names of Triton. Importing this module checks that each name exists."""

from __future__ import annotations

import importlib.util
from typing import Any

from flexsn_hop.versions import expect

_MOST_SPILLS = 256  # spilled values of 4 bytes

if importlib.util.find_spec("triton") is not None:
    expect(
        "triton.compiler.compiler",
        ["CompiledKernel", "CompiledKernel._init_handles"],
        "recurrent steps are launched one by one",
    )


def resources(compiled: Any, most: int) -> tuple[int, int] | None:
    """Returns the registers per thread and the bytes of shared memory per program of a compiled kernel.

    Returns `None` if the kernel cannot run because it needs more than `most` bytes of shared memory. Also returns
    `None` if the kernel spills many values to local memory, since one launch for each step is then faster.
    """
    shared_bytes = int(compiled.metadata.shared)
    if shared_bytes > most:
        return None
    compiled._init_handles()
    if compiled.n_spills > _MOST_SPILLS:
        return None
    return int(compiled.n_regs), shared_bytes
