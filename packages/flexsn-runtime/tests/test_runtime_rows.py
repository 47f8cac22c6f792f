"""Programs that process several rows of a step also sum gradients over these rows, in a fixed order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from runtime_cores import DEVICE, loop, random, soft_lif
from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_runtime import PointwiseProgram, prepare, scan
from flexsn_runtime.kernels._rows import rows

STEPS = 5
BLOCK = 128  # In the interpreter, programs that process rows have this block size.

# (shape of the step, shape of captured tensors, number of rows). Some steps have a partial last row or block.
CASES: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
    ((3, 5, 16, 12), (5, 1, 1), 3),
    ((7, 11, 6, 6), (11, 1, 1), 2),
    ((19, 128), (128,), 7),
    ((33, 100), (100,), 9),
    ((700, 2), (2,), 5),
    ((6, 3, 8, 5), (3, 1, 5), 2),
    ((6, 3, 8, 5), (3, 8, 5), 2),
    ((9, 128), (9, 1), 1),
    ((4, 3, 8, 64), (4, 1, 8, 1), 1),
]


@pytest.mark.parametrize(("shape", "captured", "count"), CASES, ids=str)
def test_step_is_divided_into_rows(shape: tuple[int, ...], captured: tuple[int, ...], count: int) -> None:
    layout = LiftedLayout(torch.empty(captured).expand(shape).stride(), 0)
    cut = rows(shape, [layout], BLOCK)
    assert (1 if cut is None else cut.number) == count
    if cut is not None:
        assert math.prod(cut.shape) % 16 == 0, "otherwise each element would be loaded separately"
        # Each row reads the elements of the tensor in order.
        numbers, length = torch.arange(math.prod(captured)), math.prod(cut.shape)
        step = numbers.view(captured).expand(shape).flatten().split(length)
        read = numbers.as_strided(cut.shape, cut.layout(layout).strides).flatten()
        assert len(step) == cut.number
        assert all(torch.equal(row, read[: len(row)]) for row in step)


def test_some_steps_have_no_rows() -> None:
    layout = LiftedLayout((0, 1), 0)
    assert rows((33, 100), [layout, LiftedLayout((1, 0), 0)], BLOCK) is None, "one of the tensors differs by row"
    assert rows((3, 16), [layout], BLOCK) is None, "the step has too few elements for two programs"


@pytest.mark.long(
    all_but=[
        "(33, 100)-(100,)",
        "(3, 5, 16, 12)-(5, 1, 1)",
        "(4, 3, 8, 64)-(4, 1, 8, 1)",
        "(700, 2)-(2,)",
        "(6, 3, 8, 5)-(3, 1, 5)",
        "(9, 128)-(9, 1)",
    ]
)
@pytest.mark.parametrize(
    ("shape", "captured"),
    [
        *(pytest.param(shape, captured, id=f"{shape}-{captured}") for shape, captured, _ in CASES),
        # These steps are large enough for rows on a GPU.
        *(
            pytest.param(shape, captured, id=f"{shape}-{captured}", marks=pytest.mark.gpu)
            for shape, captured in [((29, 11, 60, 60), (11, 1, 1)), ((17001, 64), (64,)), ((4099, 257), (257,))]
        ),
    ],
)
def test_gradients_equal_the_loop_and_are_repeatable(shape: tuple[int, ...], captured: tuple[int, ...]) -> None:
    """Tests a strided input, an initial state, and captured tensors, one of which is a single number."""
    gain, bias = random(*captured, seed=1).requires_grad_(), random(*captured, seed=2).requires_grad_()
    offset = torch.tensor(0.1, device=DEVICE, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> Any:
        return soft_lif(x * gain + bias + offset, v)

    x = random(STEPS, *shape, 2, seed=3)[..., 0].requires_grad_()
    v = random(*shape, seed=5).requires_grad_()
    weight = random(*x.shape, seed=4)
    leaves = [gain, bias, offset, x, v]

    def gradients(outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((outputs * weight).sum(), leaves)

    program = PointwiseProgram(core, 1, 1, 1)
    results = []
    for _ in range(2):
        step, arguments = prepare(program, (x, v))
        results.append(gradients(scan(step, arguments, state_seqs=False)[0]))
    expected = gradients(loop(core, 1, [x], [v])[0])
    for first, second, reference in zip(*results, expected, strict=True):
        assert torch.equal(first, second)
        assert (first - reference).abs().max() <= 1e-5 * math.sqrt(x.numel() / reference.numel())


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_gradient_of_one_number_for_each_step_prevents_rows(is_differentiated: bool) -> None:
    """Tests an input whose gradient is summed over all programs at each step, so that programs cannot process rows."""
    gain = random(2, seed=1).requires_grad_()
    x, v = random(STEPS, 700, 2, seed=2), random(700, 2, seed=4)
    offset = random(STEPS, 1, 1, seed=3).requires_grad_(is_differentiated)

    def core(x: Tensor, offset: Tensor, v: Tensor) -> Any:
        return soft_lif(x * gain + offset, v)

    leaves = [gain, offset] if is_differentiated else [gain]
    step, arguments = prepare(PointwiseProgram(core, 2, 1, 1), (x, offset, v))
    gradients = torch.autograd.grad(scan(step, arguments, state_seqs=False)[0].sum(), leaves)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(loop(core, 1, [x, offset], [v])[0].sum(), leaves), strict=True
    ):
        assert (gradient - reference).abs().max() <= 1e-5 * math.sqrt(x.numel() / reference.numel())
    used = [kernel for kernel in step._kernels.values() if kernel.function.__name__ in step.kernel_names]
    assert any("ROWS" in kernel.sizes for kernel in used) == (not is_differentiated and DEVICE.type == "cpu")
