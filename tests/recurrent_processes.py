"""Work of one process that shares a GPU with other processes."""

from __future__ import annotations

from typing import Any

import torch
from recurrent_cores import RLIF, Powers
from test_recurrent import make_core, make_sequences, run

from flexsn_runtime import RecurrentSpecialization, ScanProgram, prepare, scan

BARRIER: Any = None  # barrier at which the processes wait for each other


def set_barrier(barrier: Any) -> None:
    """Sets the barrier at which the processes wait for each other."""
    global BARRIER
    BARRIER = barrier


def count_differences(launches: int) -> tuple[str, int]:
    """Describes how a recurrent layer runs, and counts its results that differ from those of the loop."""
    core = make_core(RLIF, 256, Powers())
    tensors = tuple(t.detach() for t in make_sequences(core, 50, 128, 256))
    expected = run(core, tensors, None)
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), tensors)
    assert isinstance(step, RecurrentSpecialization)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad():
        scan(step, arguments, state_seqs=True)
        torch.cuda.synchronize()
        BARRIER.wait()
        for _ in range(launches):
            for a, b in zip(scan(step, arguments, state_seqs=True), expected, strict=True):
                differing += (a != b).sum()
    return step.loops.descriptions["forward"], int(differing)
