"""With unusual tensors, `scan` has right results, or errors that name the mistake and its location."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from scan_steps import looped
from torch import Tensor

from flexsn_hop import errors, scan


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return c * 2 + x, c * x


def compile_scan(step: Any) -> Any:
    return torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64], ids=str)
def test_integers_and_complex_numbers_equal_the_loop(dtype: torch.dtype) -> None:
    init, xs = torch.arange(3).to(dtype), torch.arange(12).reshape(4, 3).to(dtype)
    expected = looped(step, init, xs)
    torch.testing.assert_close(scan(step, init, xs), expected, rtol=0, atol=0)
    torch.testing.assert_close(compile_scan(step)(init, xs), expected, rtol=0, atol=0)
    empty = scan(step, init, xs[:0])
    torch.testing.assert_close(compile_scan(step)(init, xs[:0]), empty, rtol=0, atol=0)
    assert (empty[1].shape, empty[1].dtype) == ((0, 3), dtype)


def test_complex_gradient_equals_the_loop() -> None:
    init = torch.tensor([1 + 1j, 2 - 1j], requires_grad=True)
    xs = torch.tensor([[1j, 2], [0.5, -1j]], requires_grad=True)

    def gradients(run: Any) -> Any:
        carry, ys = run(init, xs)
        return torch.autograd.grad(carry.abs().square().sum() + ys.abs().square().sum(), (init, xs))

    expected = gradients(lambda init, xs: looped(step, init, xs))
    torch.testing.assert_close(gradients(compile_scan(step)), expected)


def test_carry_that_changes_its_dtype_is_refused() -> None:
    for run in (lambda init, xs: scan(step, init, xs), compile_scan(step)):
        with pytest.raises(errors.StateChangedError, match=r"carry was torch.int64 .* torch.float32 .*cast the one in"):
            run(torch.zeros(3, dtype=torch.int64), torch.randn(4, 3))


@pytest.mark.parametrize("training", [False, True])
def test_meta_tensors_are_allowed(training: bool) -> None:
    init, xs = torch.zeros(3, device="meta", requires_grad=training), torch.zeros(4, 3, device="meta")
    for run in (lambda init, xs: scan(step, init, xs), compile_scan(step)):
        carry, ys = run(init, xs)
        assert (carry.shape, ys.shape, ys.device.type) == ((3,), (4, 3), "meta")
        if training:
            assert torch.autograd.grad(ys.sum(), init)[0].is_meta


def reads(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return c + x[0].item(), c  # the line that reads


def test_number_that_a_step_reads_is_named_with_its_line() -> None:
    init, xs = torch.zeros(3), torch.arange(12.0).reshape(4, 3)
    run = compile_scan(reads)
    torch.testing.assert_close(run(init, xs), looped(reads, init, xs))
    with pytest.raises(errors.EmptyScanError, match=r"\(File .*test_hop_unusual.py.* in reads .*the line that reads"):
        scan(reads, init, xs[:0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    with pytest.raises(errors.NotATensorError, match=r"xs is a nested tensor, .*to_padded_tensor"):
        scan(step, torch.zeros(3), nested)
