"""What only a GPU can show: sizes beyond 2^31, and how often something is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from scan_cores import CASES, hard_spike, problem
from torch import Tensor

from flexsn_hop import eager_scan_final_state
from flexsn_runtime import ScanProgram, prepare, scan

pytestmark = pytest.mark.gpu

LIF = CASES[1]


def compiled(program: ScanProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
    return scan(*prepare(program, tensors), state_seqs=False)


@pytest.fixture
def compilations() -> Iterator[list[object]]:
    """Grows by one for each kernel that Triton compiles or reads from its disk cache."""
    import triton

    seen: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: seen.append(event)
    yield seen
    triton.knobs.runtime.jit_post_compile_hook = None


def test_nothing_is_compiled_again_for_another_t(compilations: list[object]) -> None:
    program = ScanProgram(LIF.make(hard_spike, []), 1, 1, 1)
    for steps in (8, 512, 1, 7, 33):
        x = torch.rand(steps, 5000, device="cuda").requires_grad_()
        compiled(program, x)[0].sum().backward()
        # The forward that writes checkpoints, and the backward.
        assert len(compilations) == 2, f"T = {steps}"


def test_nothing_is_compiled_again_for_another_batch(compilations: list[object]) -> None:
    program = ScanProgram(LIF.make(hard_spike, []), 1, 1, 1)
    for batch in (64, 16, 128):
        x = torch.rand(8, batch, 256, device="cuda").requires_grad_()
        compiled(program, x)[0].sum().backward()
    assert len(compilations) == 2


def test_more_than_two_to_the_31_elements() -> None:
    """The last elements lie beyond what 32 bits count; eager computes just those."""
    steps, elements, tail = 5, 2**29 + 3, 1000
    program = ScanProgram(LIF.make(hard_spike, []), 1, 1, 1)
    x = torch.empty(steps, elements, device="cuda").uniform_(0.0, 3.0).requires_grad_()
    assert x.numel() > 2**31
    spikes, v = compiled(program, x)
    end = x.detach()[:, -tail:].clone().requires_grad_()
    expected = eager_scan_final_state(program.core, 1, 1, 1, end, torch.zeros(tail, device="cuda"))
    assert torch.equal(spikes[:, -tail:], expected[0])
    assert torch.equal(v[-tail:], expected[1])
    (grad,) = torch.autograd.grad(spikes, x, torch.ones_like(spikes))
    (grad_end,) = torch.autograd.grad(expected[0], end, torch.ones_like(expected[0]))
    torch.testing.assert_close(grad[:, -tail:], grad_end)


def test_gradients_are_equal_from_run_to_run() -> None:
    p = problem(CASES[8], 50, (301, 67), device="cuda")
    program = ScanProgram(p.core, *p.counts)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(program, *p.inputs, *p.states)[0].sum(), p.leaves)

    first = gradients()
    for _ in range(5):
        for one, other in zip(first, gradients(), strict=True):
            assert torch.equal(one, other)
