"""`FlexSNKernel`: a step function as a callable that stores no state."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from flexsn_hop import eager_scan
from flexsn_nn import FlexSNKernel, InputCountError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = (3, 371)


def core(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = v * 0.5 + x * y
    return h - y, h * h, h


def make_problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, *STEP), (5, *STEP), STEP)
    x, y, v = (torch.randn(s, generator=generator).to(DEVICE).requires_grad_() for s in shapes)
    return x, y, v


def test_results_and_gradients_equal_those_of_the_loop() -> None:
    args = make_problem()
    results, expected = FlexSNKernel(core, 2, 1, 2)(*args), eager_scan(core, 2, 1, 2, *args)
    assert isinstance(results, tuple)
    assert len(results) == 3
    weights = [torch.rand_like(t) - 0.4 for t in expected]
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
    gradients = torch.autograd.grad(results, args, weights)
    for a, b in zip(gradients, torch.autograd.grad(expected, args, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_kernel_stores_no_state() -> None:
    kernel, args = FlexSNKernel(core, 2, 1, 2), make_problem()
    for a, b in zip(kernel(*args), kernel(*args), strict=True):
        assert torch.equal(a, b)


def test_no_steps_return_empty_results() -> None:
    x, y, v = make_problem()
    for result in FlexSNKernel(core, 2, 1, 2)(x[:0], y[:0], v):
        assert result.shape == (0, *STEP)


def test_requires_grad_blocks_gradients() -> None:
    x, y, v = make_problem()
    FlexSNKernel(core, 2, 1, 2, requires_grad=(True, False, True))(x, y, v)[1].sum().backward()
    assert x.grad is not None
    assert y.grad is None
    assert v.grad is not None


@pytest.mark.parametrize("make", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_copies_compile_separately(make: Any) -> None:
    kernel, args = FlexSNKernel(core, 2, 1, 2), make_problem()
    expected = kernel(*args)
    for a, b in zip(make(kernel)(*args), expected, strict=True):
        assert torch.equal(a, b)


def test_wrong_arguments_are_refused() -> None:
    kernel, (x, y, v) = FlexSNKernel(core, 2, 1, 2), make_problem()
    with pytest.raises(InputCountError, match=r"got 2 tensors; num_inputs \+ num_states is 2 \+ 1 = 3"):
        kernel(x, y)
    with pytest.raises(ValueError, match="got 4 tensors"):
        kernel(x, y, v, v)
    not_a_tensor: Any = None
    with pytest.raises(TypeError, match="argument 2 is a NoneType; a kernel takes tensors"):
        kernel(x, y, not_a_tensor)
    with pytest.raises(RuntimeError, match=r"are on .* and meta: move them to one device"):
        kernel(x, y.to("meta"), v)
    with pytest.raises(RuntimeError, match="there are no compiled kernels for 'meta' tensors"):
        kernel(x.to("meta"), y.to("meta"), v.to("meta"))
    with pytest.raises(ValueError, match="requires_grad has 2 entries for 2 inputs and 1 states: give 3"):
        FlexSNKernel(core, 2, 1, 2, requires_grad=(True, False))
    with pytest.raises(ValueError, match=r"returned 3 values; .* 1 \+ 1 = 2"):
        FlexSNKernel(core, 2, 1, 1, (torch.zeros(3),) * 3)


# Dynamo reads this attribute.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_kernel_runs_between_the_graphs_of_a_compiler() -> None:
    kernel, args = FlexSNKernel(core, 2, 1, 2), make_problem()
    torch._dynamo.reset()
    run = torch.compile(lambda x, *rest: kernel(x * 2.0, *rest)[0] + 1.0, backend="aot_eager")
    result, expected = run(*args), eager_scan(core, 2, 1, 2, args[0] * 2.0, *args[1:])[0] + 1.0
    assert torch.equal(result, expected)
    gradients, expected_gradients = (torch.autograd.grad(output.sum(), args) for output in (result, expected))
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
