"""The first backward kernel is compiled together with the first forward kernel, in another thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from runtime_cores import STEP, random, soft_lif
from torch import Tensor

from flexsn_graph.tracing._tracer import Tracer
from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime.launches._launch import Launch

Compiled = tuple[threading.Thread, list[torch.dtype]]


@pytest.fixture
def compiled() -> Iterator[list[Compiled]]:
    """Records the thread and the dtypes of each launch that would be compiled ahead. No kernel is compiled."""
    launches: list[Compiled] = []

    def compile(self: Launch, tensors: Sequence[Tensor]) -> None:
        assert all(t.data_ptr() % 16 == 0 for t in tensors)
        launches.append((threading.current_thread(), [t.dtype for t in tensors]))

    with mock.patch.object(Launch, "is_compiled", False), mock.patch.object(Launch, "compile", compile):
        yield launches


def run(program: ScanProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
    return scan(*prepare(program, tensors), state_seqs=False)


def test_step_is_compiled_once_in_another_thread(compiled: list[Compiled]) -> None:
    program = ScanProgram(soft_lif, 1, 1, 1)
    x = random(11, *STEP, dtype=torch.float64).requires_grad_()
    output, _ = run(program, x)
    ((thread, dtypes),) = compiled
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert dtypes == [torch.float64] * 4  # input, checkpoint, gradient of the output, gradient of the input
    output.sum().backward()
    run(program, random(13, *STEP, dtype=torch.float64).requires_grad_())
    assert len(compiled) == 1


def test_nothing_is_compiled_without_gradients(compiled: list[Compiled]) -> None:
    run(ScanProgram(soft_lif, 1, 1, 1), random(3, *STEP))
    assert not compiled


def test_refused_gradient_is_reported_in_the_backward(compiled: list[Compiled]) -> None:
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad.cumsum(0)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return Refused.apply(x + v), v

    output, _ = run(ScanProgram(core, 1, 1, 1), random(3, *STEP).requires_grad_())
    assert not compiled
    with pytest.raises(NotImplementedError, match="cumsum"):
        output.sum().backward()


def test_first_training_step_with_a_product_traces_twice_and_differentiates_once(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the traces: an attempt without products, and the step. All backwards share one gradient."""
    weight = torch.randn(4, 4, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, torch.tanh(x + v @ weight.t())

    traces, gradients = Counter[str](), Counter[str]()
    trace, differentiate = Tracer.__init__, Tracer.record_vjp

    def count_trace(self: Tracer, *args: Any, **options: Any) -> None:
        traces["traces"] += 1
        trace(self, *args, **options)

    def count_gradient(self: Tracer, *args: Any, **options: Any) -> Any:
        gradients["gradients"] += 1
        return differentiate(self, *args, **options)

    monkeypatch.setattr(Tracer, "__init__", count_trace)
    monkeypatch.setattr(Tracer, "record_vjp", count_gradient)
    x = torch.randn(3, 2, 4, requires_grad=True)
    output, state = run(ScanProgram(core, 1, 1, 1), x, torch.zeros(2, 4))
    (output.sum() + state.sum()).backward()
    assert (traces["traces"], gradients["gradients"]) == (2, 1)
