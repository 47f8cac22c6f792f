"""The compiled scan, compared with the eager loop. Values in float32 are bitwise equal, and gradients are equal up to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scan_cores import CASES, Case, Problem, problem
from torch import Tensor

from flexsn_hop import eager_scan, eager_scan_final_state
from flexsn_runtime import ScanProgram, TargetName, prepare, scan

# The elements of a step are two blocks of 512 elements, the interpreter's block size, and a partial block.
STEP = (41, 37)
# The elements are two blocks of 256 elements, the block size of C++ for small steps, and a partial block.
CPP_STEP = (19, 37)
# Each size class of the GPU has a shape with several blocks. No size is a multiple of a block or of 16 bytes.
GPU_STEPS = ((41, 37), (613, 217), (1001, 1501))

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run_compiled(p: Problem, *, state_seqs: bool, on_cpu: TargetName = "triton") -> tuple[Tensor, ...]:
    step, arguments = prepare(ScanProgram(p.core, *p.counts, on_cpu=on_cpu), (*p.inputs, *p.states))
    return scan(step, arguments, state_seqs=state_seqs)


def run_loop(p: Problem, *, state_seqs: bool) -> tuple[Tensor, ...]:
    function = eager_scan if state_seqs else eager_scan_final_state
    return function(p.core, *p.counts, *p.inputs, *p.states)


def assert_parity(
    p: Problem, *, state_seqs: bool, rtol: float = 1e-5, exact: bool = True, on_cpu: TargetName = "triton"
) -> None:
    actual, expected = run_compiled(p, state_seqs=state_seqs, on_cpu=on_cpu), run_loop(p, state_seqs=state_seqs)
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        if exact:
            assert torch.equal(a, b), f"result {i}: {int((a != b).sum())} of {a.numel()} differ"
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    torch.manual_seed(1)
    weights = [torch.rand_like(t) - 0.3 for t in expected]
    grads = torch.autograd.grad(actual, p.leaves, weights)
    assert_gradients(p, grads, torch.autograd.grad(expected, p.leaves, weights), rtol)


def assert_gradients(p: Problem, actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape, i
        assert a.dtype == b.dtype, i
        # The gradient of a parameter is a long sum in which many terms cancel.
        limit = rtol if i < len(p.inputs) + len(p.states) else 10 * rtol
        error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30)
        assert error < limit, f"gradient {i} differs by {error:.2e} of its largest entry"


@pytest.mark.long(
    all_but=[
        "seqs-1-alif",
        "seqs-15-plif_neuron",
        "final-7-if",
        "final-7-lif_soft_detached",
        "final-7-two_in_two_out",
        "final-7-izhikevich",
        "final-33-lif_hard",
    ]
)
@cases
@pytest.mark.parametrize("steps", [1, 2, 7, 15, 33])
@pytest.mark.parametrize("state_seqs", [False, True], ids=["final", "seqs"])
def test_interpreted_kernels_equal_the_loop(case: Case, steps: int, state_seqs: bool, interpreted: None) -> None:
    assert_parity(problem(case, steps, STEP), state_seqs=state_seqs, exact=case.exact_on_cpu)


@pytest.mark.long(
    all_but=[
        "final-15-alif",
        "final-7-two_in_two_out",
        "final-7-plif_channel",
        "seqs-33-lif_hard",
    ]
)
@cases
@pytest.mark.parametrize("steps", [1, 7, 15, 33])
@pytest.mark.parametrize("state_seqs", [False, True], ids=["final", "seqs"])
def test_cpp_kernels_equal_the_loop(case: Case, steps: int, state_seqs: bool, compiler: None) -> None:
    p = problem(case, steps, CPP_STEP)
    assert_parity(p, state_seqs=state_seqs, exact=case.exact_on_cpu, on_cpu="cpp")


def _compare_integers(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x > v, torch.maximum(v, x)


@pytest.mark.long(all_but=["cpp-torch.bool", "cpp-torch.int8", "triton-torch.bool"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("on_cpu", ["cpp", "triton"])
def test_integer_state_starts_from_zeros(
    dtype: torch.dtype, on_cpu: TargetName, compiler: None, interpreted: None
) -> None:
    """Checks the zeros of integers that a kernel uses if it receives no initial state."""
    generator = torch.Generator().manual_seed(3)
    sequence = torch.randint(0, 2 if dtype == torch.bool else 100, (9, *CPP_STEP), generator=generator).to(dtype)
    step, arguments = prepare(ScanProgram(_compare_integers, 1, 1, 1, on_cpu=on_cpu), (sequence,))
    actual = scan(step, arguments, state_seqs=True)
    expected = eager_scan(_compare_integers, 1, 1, 1, sequence, torch.zeros(CPP_STEP, dtype=dtype))
    assert [t.dtype for t in actual] == [t.dtype for t in expected] == [torch.bool, dtype]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.long(all_but=["lif_hard*", "alif"])
@cases
def test_float64_gradients_in_cpp_equal_the_loop(case: Case, compiler: None) -> None:
    p = problem(case, 9, CPP_STEP, dtype=torch.float64)
    assert_parity(p, state_seqs=True, rtol=1e-12, exact=case.exact_on_cpu, on_cpu="cpp")


@pytest.mark.long
@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=lambda case: case.name)
def test_a_thousand_interpreted_steps_equal_the_loop(case: Case, interpreted: None) -> None:
    assert_parity(problem(case, 1000, (9, 61)), state_seqs=False, exact=case.exact_on_cpu)


# Each length has only one shape. New lengths need new kernels, and compilation takes most of the time.
@cases
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "steps"),
    [(GPU_STEPS[0], 1), (GPU_STEPS[1], 2), (GPU_STEPS[2], 7), (GPU_STEPS[0], 15), (GPU_STEPS[1], 33)],
    ids=str,
)
def test_kernels_equal_the_loop_on_the_gpu(case: Case, steps: int, step: tuple[int, ...]) -> None:
    for state_seqs in (False, True):
        assert_parity(problem(case, steps, step, device="cuda"), state_seqs=state_seqs, rtol=3e-5)


@cases
@pytest.mark.gpu
def test_a_thousand_steps_equal_the_loop_on_the_gpu(case: Case) -> None:
    assert_parity(problem(case, 1000, GPU_STEPS[1], device="cuda"), state_seqs=False, rtol=1e-4)


@pytest.mark.long(all_but=["plif_channel", "lif_hard_detached"])
@cases
def test_float64_gradients_equal_the_loop(case: Case, interpreted: None) -> None:
    p = problem(case, 9, STEP, dtype=torch.float64)
    assert_parity(p, state_seqs=True, rtol=1e-12, exact=case.exact_on_cpu)


@pytest.mark.long(all_but=["*plif_scalar*", "*lif_soft"])
@cases
def test_empty_sequences_return_the_initial_states(case: Case, interpreted: None) -> None:
    p = problem(case, 0, (5, 7))
    outputs = p.counts[2]
    results = run_compiled(p, state_seqs=False)
    for sequence in results[:outputs]:
        assert sequence.shape == (0, 5, 7)
    for final, initial in zip(results[outputs:], p.states, strict=True):
        assert torch.equal(final, initial)
        assert final.data_ptr() != initial.data_ptr()
    weights = [torch.rand_like(final) for final in results[outputs:]]
    grads = torch.autograd.grad(results[outputs:], p.leaves, weights, allow_unused=True)
    count = len(p.inputs)
    for weight, grad in zip(weights, grads[count : count + len(p.states)], strict=True):
        assert torch.equal(grad, weight)
    for leaf, grad in zip(p.leaves[:count], grads[:count], strict=True):
        assert grad is None or (grad.shape == leaf.shape and not grad.any())


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 10])
def test_all_spikes_equal_the_loop_on_the_gpu(steps: int) -> None:
    """Checks that more than 10^8 outputs of LIF in float32 equal the eager loop."""
    case = CASES[1]
    elements = 10**8 // steps + 7
    p = problem(case, steps, (elements,), device="cuda")
    with torch.no_grad():
        actual, expected = run_compiled(p, state_seqs=False), run_loop(p, state_seqs=False)
    assert actual[0].numel() >= 10**8
    assert 0.1 < actual[0].mean().item() < 0.9
    assert int((actual[0] != expected[0]).sum()) == 0
    assert torch.equal(actual[1], expected[1])
