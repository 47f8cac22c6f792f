"""Properties of scans that need a GPU to be checked: more than 2^31 elements, and the number of compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scan_cores import CASES, Case, hard_spike, problem
from torch import Tensor

from flexsn_hop import eager_scan_final_state
from flexsn_runtime import ScanProgram, prepare, scan

pytestmark = pytest.mark.gpu

LIF = CASES[1]


def run_compiled(program: ScanProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
    return scan(*prepare(program, tensors), state_seqs=False)


_constants = itertools.count()


def make_new_program() -> ScanProgram:
    """Returns a LIF program with a unique constant. Otherwise, earlier tests would have compiled its kernels."""
    lif, shift = LIF.make(hard_spike, []), 2.0**-7 * next(_constants)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = lif(x - 0.3 + shift, v)
        return results

    return ScanProgram(core, 1, 1, 1)


@pytest.fixture
def compilations() -> Iterator[list[object]]:
    """Yields a list. Triton adds one entry for each kernel that it compiles or reads from its disk cache."""
    import triton

    kernels: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: kernels.append(event)
    yield kernels
    triton.knobs.runtime.jit_post_compile_hook = None


def test_new_lengths_compile_nothing(compilations: list[object]) -> None:
    program = make_new_program()
    # Each call needs two kernels: a forward with checkpoints, and a backward. Sequences of 4 and of 8 steps have other
    # kernels than longer sequences.
    for steps, count in ((9, 2), (500, 2), (33, 2), (8, 4), (4, 6), (9, 6), (8, 6), (4, 6)):
        x = torch.rand(steps, 5000, device="cuda").requires_grad_()
        run_compiled(program, x)[0].sum().backward()
        assert len(compilations) == count, f"T = {steps}"


def test_segments_share_kernels_for_all_lengths(
    compilations: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))  # so that no warm-up is stored
    program = make_new_program()
    # Segments have five more kernels. The forward has kernels for guesses and repairs. The backward has kernels for
    # maps, for gradients that enter segments, and for all gradients.
    for steps, count in ((9, 2), (1024, 7), (1280, 7), (2049, 7), (9, 7)):
        x = torch.rand(steps, 5000, device="cuda").requires_grad_()
        run_compiled(program, x)[0].sum().backward()
        assert len(compilations) == count, f"T = {steps}"


def test_memory_bound_steps_have_no_segments(compilations: list[object]) -> None:
    program = make_new_program()
    x = torch.rand(2048, 8192, device="cuda").requires_grad_()
    run_compiled(program, x)[0].sum().backward()
    assert len(compilations) == 2


def test_new_batch_sizes_compile_nothing(compilations: list[object]) -> None:
    program = make_new_program()
    for batch in (64, 16, 128):
        x = torch.rand(8, batch, 256, device="cuda").requires_grad_()
        run_compiled(program, x)[0].sum().backward()
    assert len(compilations) == 2


def test_backward_is_compiled_with_the_forward(compilations: list[object]) -> None:
    program = make_new_program()
    x = torch.rand(9, 5000, device="cuda").requires_grad_()
    spikes, v = run_compiled(program, x)
    assert len(compilations) == 2
    spikes.sum().backward(retain_graph=True)
    assert len(compilations) == 2
    (spikes.sum() + v.sum()).backward()  # this backward has another set of incoming gradients
    assert len(compilations) == 3


def test_recurrent_backward_is_compiled_with_the_forward(compilations: list[object]) -> None:
    lif, shift = LIF.make(hard_spike, []), 2.0**-7 * next(_constants)
    weight = torch.randn(256, 256, device="cuda").requires_grad_()  # the gradient of a matrix is a product in parts

    def core(x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s, v = lif(x - 0.3 + shift + s @ weight, v)
        return s, s, v

    x = torch.rand(40, 64, 256, device="cuda").requires_grad_()
    spikes = run_compiled(ScanProgram(core, 1, 2, 1), x)[0]
    count = len(compilations)
    assert count >= 2
    spikes.sum().backward()
    assert len(compilations) == count


def test_sequences_may_exceed_two_to_the_31_elements() -> None:
    """Checks the last elements of a sequence, whose indices exceed 32 bits. The loop computes only these elements."""
    steps, elements, tail = 5, 2**29 + 3, 1000
    program = ScanProgram(LIF.make(hard_spike, []), 1, 1, 1)
    x = torch.empty(steps, elements, device="cuda").uniform_(0.0, 3.0).requires_grad_()
    assert x.numel() > 2**31
    spikes, v = run_compiled(program, x)
    end = x.detach()[:, -tail:].clone().requires_grad_()
    expected = eager_scan_final_state(program.core, 1, 1, 1, end, torch.zeros(tail, device="cuda"))
    assert torch.equal(spikes[:, -tail:], expected[0])
    assert torch.equal(v[-tail:], expected[1])
    (grad,) = torch.autograd.grad(spikes, x, torch.ones_like(spikes))
    (grad_end,) = torch.autograd.grad(expected[0], end, torch.ones_like(expected[0]))
    torch.testing.assert_close(grad[:, -tail:], grad_end)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_do_not_depend_on_residuals(case: Case) -> None:
    """Checks that gradients with saved values equal gradients with recomputed values, in every size class."""
    for shape in ((301, 67), (3001, 67), (20011, 67)):
        actual = []
        for residuals in ("save", "recompute"):
            p = problem(case, 21, shape, device="cuda")
            program = ScanProgram(p.core, *p.counts, residuals=residuals)
            results = run_compiled(program, *p.inputs, *p.states)
            differentiable = [r for r in results if r.requires_grad]
            ones = [torch.ones_like(r) for r in differentiable]
            actual.append((results, torch.autograd.grad(differentiable, p.leaves, ones)))
        for a, b in zip(actual[0][0], actual[1][0], strict=True):
            assert torch.equal(a, b)
        for a, b in zip(actual[0][1], actual[1][1], strict=True):
            # Recomputed divisions may have errors of up to 2 ulp.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def test_gradients_are_equal_in_each_run() -> None:
    p = problem(CASES[8], 50, (301, 67), device="cuda")
    program = ScanProgram(p.core, *p.counts)

    def compute_gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run_compiled(program, *p.inputs, *p.states)[0].sum(), p.leaves)

    first = compute_gradients()
    for _ in range(5):
        for gradient, repeated in zip(first, compute_gradients(), strict=True):
            assert torch.equal(gradient, repeated)


def test_fast_math_does_not_change_exact_kernels() -> None:
    """Checks a step whose functions have no faster form. With fast math, its kernels differ only in the compiler's
    options, and kernels without fast math stay exact.
    """

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.37 + x * 0.61
        return h * h + x, h - h * x * 0.1

    x, v = torch.randn(33, 5000, device="cuda"), torch.zeros(5000, device="cuda")
    expected = eager_scan_final_state(core, 1, 1, 1, x, v)
    fast, exact = (ScanProgram(core, 1, 1, 1, fast_math=fast_math) for fast_math in (True, False))
    for _ in range(2):
        actual = run_compiled(fast, x, v)
        for a, b in zip(run_compiled(exact, x, v), expected, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.equal(actual[0], expected[0])  # otherwise, the option would have no effect
