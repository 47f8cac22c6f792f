"""Tensors with one number per step are read once. Gradients are summed within programs, and then over programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime_cores import DEVICE, STEP, assert_like_the_loop, compiled, loop, random
from torch import Tensor

from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime.kernels._backward import BackwardScan
from flexsn_runtime.kernels._sums import sum_over
from flexsn_runtime.step._pointwise_step import Specialization


@pytest.mark.long(all_but=["shape1-1", "shape2-4", "shape0-11"])
@pytest.mark.parametrize("steps", [1, 4, 11])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_input_of_one_number_per_step_equals_the_loop(steps: int, shape: tuple[int, ...]) -> None:
    def core(x: Tensor, c: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * c
        return h.square() - c, h

    x = random(steps, *STEP).requires_grad_()
    c = random(steps, *shape, seed=1).requires_grad_()
    v = random(*STEP, seed=2).requires_grad_()
    assert_like_the_loop(core, 1, [x, c], [v])


def test_gradient_of_a_view_of_one_number_has_the_size_of_the_view() -> None:
    """Tests an expanded view, whose gradient is not summed."""
    x, v = random(5, *STEP), random(*STEP, seed=2)
    c = random(5, 1, 1, seed=1).expand(5, *STEP).requires_grad_()
    assert_like_the_loop(lambda x, c, v: (v + x * c, v * 0.5 + c), 1, [x, c], [v])


@pytest.mark.parametrize("take", [lambda w: w[1], lambda w: w[1, None], lambda w: w[1].expand(STEP)])
def test_captured_element_of_a_tensor_equals_the_loop(take: Callable[[Tensor], Tensor]) -> None:
    w = random(3, seed=3).requires_grad_()
    x, v = random(11, *STEP).requires_grad_(), random(*STEP, seed=2)
    assert_like_the_loop(lambda x, v: (v * take(w) + x, v * 0.5 + x * w[2]), 1, [x], [v], [w])


def test_lanes_beyond_the_step_are_not_summed() -> None:
    """Tests a step with reciprocals, which are infinite in the lanes beyond the step."""
    w = torch.tensor(0.5, device=DEVICE, requires_grad=True)
    x = (random(7, *STEP).abs() + 1.0).requires_grad_()
    c = random(7, seed=1).requires_grad_()
    v = random(*STEP, seed=2)
    assert_like_the_loop(lambda x, c, v: ((w + c) / x + v, v * 0.5), 1, [x, c], [v], [w])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_numbers_are_rounded_only_once(dtype: torch.dtype) -> None:
    """Sums 1517 terms. The loop rounds the sum in each step, and the kernel rounds it once."""
    w = torch.tensor(0.5, device=DEVICE, dtype=dtype, requires_grad=True)
    x, c = torch.ones(3, *STEP, device=DEVICE, dtype=dtype), torch.ones(3, device=DEVICE, dtype=dtype)
    c.requires_grad_()

    def core(x: Tensor, c: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * w + x * c, v

    output = compiled(core, 1, [x, c], [torch.zeros_like(x[0])])[0]
    gradients = torch.autograd.grad(output.float().sum(), [w, c])
    assert torch.equal(gradients[0], torch.tensor(3.0 * 41 * 37, device=DEVICE).to(dtype))
    assert torch.equal(gradients[1], torch.full((3,), 41.0 * 37, device=DEVICE).to(dtype))


@pytest.mark.parametrize("shape", [(2**13, 128), (4099, 257), (64, 40, 2, 256), (3, 2**20), (2**20, 1)])
@pytest.mark.parametrize("dims", [[], [0], [0, 1], [1]])
def test_sums_of_large_matrices_are_exact(shape: tuple[int, ...], dims: list[int]) -> None:
    """Tests matrices. If the number of rows allows it, several rows are treated as one longer row."""
    tensor = torch.randint(-8, 8, shape).float()  # the sums are exact in any order
    expected = tensor.double().sum(dims) if dims else tensor.double()
    assert torch.equal(sum_over(shape, dims)(tensor).double().view_as(expected), expected)


@pytest.mark.parametrize(
    ("shape", "dims", "steps"),
    [
        ((6, 5, 28, 28), (0, 2, 3), 2),
        ((11, 3, 14, 14), (0, 2, 3), 2),
        ((3, 4, 6, 7, 49), (1, 3, 4), 2),
        ((2, 3, 1021, 2), (0, 2), 1),  # the last dimension is not summed
        ((3, 2, 1021), (0, 2), 1),  # a prime number
        ((2, 3, 5000), (0, 2), 1),  # many columns
        ((2, 3, 40), (0, 2), 1),  # few columns
        ((4, 2000), (1,), 2),
    ],
)
def test_sums_of_planes_sum_rows_first(shape: tuple[int, ...], dims: tuple[int, ...], steps: int) -> None:
    """Checks that sums over a few thousand elements first sum rows."""
    tensor = torch.randint(-8, 8, shape).float()  # the sums are exact in any order
    summation = sum_over(shape, dims)
    assert len(summation.steps) == steps
    expected = tensor.double().sum(dims)
    assert torch.equal(summation(tensor).double().view_as(expected), expected)


@pytest.mark.long
@pytest.mark.parametrize(("channels", "alike"), [(8, [3]), (7, []), (1, [])])
def test_gradients_with_equal_layouts_are_summed_together(channels: int, alike: list[int]) -> None:
    """Tests three vectors of one layout and one of another layout. Only 8 channels have an aligned number of bytes."""
    shape = (5, channels, 6)
    a, b, c = (random(channels, seed=seed).requires_grad_() for seed in range(3))
    other = random(6, seed=4).requires_grad_()
    x, v = random(4, *shape).requires_grad_(), random(*shape, seed=5)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * a[:, None] + x * b[:, None] + c[:, None]
        return h * other, h

    assert_like_the_loop(core, 1, [x], [v], [a, b, c, other])
    step, arguments = prepare(ScanProgram(core, 1, 1, 1), (x, v))
    assert isinstance(step, Specialization)
    results = scan(step, arguments, state_seqs=False)
    gradients = torch.autograd.grad(results[0], [a, b, c, other], torch.ones_like(results[0]))
    assert not any(gradient._is_view() for gradient in gradients)
    plans = [backward.plan for backward in step.plans.values() if isinstance(backward, BackwardScan)]
    assert [len(group.results) for plan in plans for group in plan.together] == alike


def test_gradients_pass_gradcheck() -> None:
    w = random(dtype=torch.float64, seed=3).requires_grad_()
    program = ScanProgram(lambda x, c, v: ((v * w + x * c).tanh(), v * 0.5 + x * c * w), 2, 1, 1)

    def run(x: Tensor, c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return compiled(program, 1, [x, c], [v], state_seqs=False)

    tensors = [random(3, 67, dtype=torch.float64), random(3, 1, dtype=torch.float64, seed=1)]
    tensors.append(random(67, dtype=torch.float64, seed=2))
    # The check is made in random directions, because the step has several blocks.
    assert torch.autograd.gradcheck(run, [*(t.requires_grad_() for t in tensors), w], fast_mode=True)


def test_initial_states_may_be_views_of_a_number() -> None:
    x, v = random(3, *STEP), random(seed=2).expand(STEP)
    expected = loop(lambda x, v: (x + v, x * v), 1, [x], [v])
    for actual, reference in zip(compiled(lambda x, v: (x + v, x * v), 1, [x], [v]), expected, strict=True):
        assert torch.equal(actual, reference)
