"""Compilation of the backward of a recurrent step. Its kernels are compiled during the first forward, in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from recurrent_cores import RLIF, Biased, Cell, GatedGRU, Powers, Readout
from test_recurrent import make_core, make_sequences, run
from torch import Tensor

from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime._recent import Recent
from flexsn_runtime.launches._cooperative_launch import CooperativeKernel
from flexsn_runtime.launches._launch import Launch
from flexsn_runtime.program import _twins
from flexsn_runtime.recurrent import _staged_autograd

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the test counts compilations in the interpreter")


class Compiled(list[tuple[str, threading.Thread]]):
    """A list of compiled kernels: the name of each kernel, and the thread that compiled the kernel."""

    fails_in_other_threads = False  # if True, compilation fails in other threads

    def add(self, name: str) -> None:
        thread = threading.current_thread()
        self.append((name, thread))
        if self.fails_in_other_threads and thread is not threading.main_thread():
            raise RuntimeError("no compiler")

    @property
    def other_threads(self) -> list[threading.Thread]:
        return [thread for _, thread in self if thread is not threading.main_thread()]


@pytest.fixture
def compiled() -> Iterator[Compiled]:
    """Records the first launch of each kernel as its compilation, since the interpreter compiles nothing."""
    names = Compiled()

    def room(self: CooperativeKernel, tensors: Sequence[Tensor], numbers: Sequence[int]) -> int:
        names.add(self._function.__name__)
        return 1

    call_launch = Launch.__call__
    launches: set[Launch] = set()

    def compile(self: Launch, tensors: Sequence[Tensor]) -> None:
        if self not in launches:
            names.add(self._function.__name__)
            launches.add(self)

    def launch(self: Launch, tensors: Sequence[Tensor]) -> None:
        self.compile(tensors)
        call_launch(self, tensors)

    with (
        mock.patch.object(_staged_autograd, "_needs_compilation", return_value=True),
        mock.patch.object(CooperativeKernel, "_count_resident", room),
        mock.patch.object(Launch, "compile", compile),
        mock.patch.object(Launch, "__call__", launch),
        mock.patch.object(_twins, "_steps", Recent()),  # without this patch, earlier tests would share their kernels
    ):
        yield names


def run_forward(core: Cell, batch: int = 5) -> tuple[Tensor, list[Tensor]]:
    """Returns the output of a scan, and the tensors that require gradients."""
    tensors = make_sequences(core, 3, batch, core.size)
    step, arguments = prepare(ScanProgram(core, 1, core.num_states, 1), tensors)
    return scan(step, arguments, state_seqs=False)[0], [*tensors, *core.parameters()]


@pytest.mark.parametrize("cell", [RLIF, Readout, pytest.param(GatedGRU, marks=pytest.mark.long)])
def test_backward_compiles_nothing(cell: type[Cell], compiled: Compiled) -> None:
    """Checks a step in one launch, stages that run step by step, and stages that run for all steps at once."""
    output, leaves = run_forward(make_core(cell, 9, Powers()))
    count = len(compiled)
    assert 0 < len(compiled.other_threads) < count
    assert not any(thread.is_alive() for thread in compiled.other_threads)
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    assert len(compiled) == count
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_backward_of_a_sum_compiles_nothing(compiled: Compiled) -> None:
    """Checks a backward whose incoming gradient is the gradient of a sum, that is, an expanded tensor."""
    output, leaves = run_forward(make_core(Biased, 9, Powers()))
    count = len(compiled)
    torch.autograd.grad(output.sum(), leaves)
    assert len(compiled) == count


def test_calls_without_gradients_compile_no_backward(compiled: Compiled) -> None:
    core = make_core(RLIF, 9, Powers())
    with torch.no_grad():
        run(core, make_sequences(core, 3, 5, 9), "triton")
    assert compiled
    assert not compiled.other_threads


def test_failed_compilation_is_repeated_in_the_backward(compiled: Compiled) -> None:
    compiled.fails_in_other_threads = True
    output, leaves = run_forward(make_core(RLIF, 9, Powers()))
    (failed,) = [name for name, thread in compiled if thread in compiled.other_threads]
    count = len(compiled)
    torch.autograd.grad(output.square().sum(), leaves)
    assert failed in [name for name, _ in compiled[count:]]
