"""Several threads may call one pointwise function for the first time at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import pointwise

NUM_THREADS = 6
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(params=["triton", "cpp"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up kernels for CPU tensors, in each language in turn."""
    if request.param == "cpp":
        from flexsn_codegen.targets.triton import device

        request.getfixturevalue("compiler")
        monkeypatch.setattr(device, "INTERPRETED", False)
    else:
        request.getfixturevalue("interpreted")


def run_in_threads(call: Callable[[int], None]) -> None:
    """Calls `call(number of the thread)` in all threads at once, and raises the first error."""
    barrier, errors = threading.Barrier(NUM_THREADS), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            call(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_first_calls_in_several_threads_share_a_trace(target: None) -> None:
    fused = pointwise(lambda x: x * 2 + 1)
    x = torch.arange(5.0)
    results: list[Tensor] = []
    run_in_threads(lambda _: results.append(fused(x)))
    assert len(results) == NUM_THREADS
    for y in results:
        assert torch.equal(y, x * 2 + 1)
    assert len(fused._kernels.all()) == 1  # the threads share one trace


@pytest.mark.long(all_but=["cpp"])
def test_calls_with_several_dtypes_and_backwards_are_right(target: None) -> None:
    weight = nn.Parameter(torch.full((5,), 3.0))
    fused = pointwise(lambda x, number: x * x * weight.to(x.dtype) + number, autograd=True)

    def call(number: int) -> None:
        x = torch.arange(1.0, 6.0, dtype=DTYPES[number % 3], requires_grad=True)
        y = fused(x, float(number))
        assert torch.equal(y.detach(), x.detach().square() * 3 + number)
        (gradient,) = torch.autograd.grad(y.sum(), [x])
        assert torch.equal(gradient, 6 * x.detach())

    run_in_threads(call)


def test_calls_of_cutting_functions_are_right(target: None) -> None:
    def halves(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return gate.sigmoid() * value

    fused = pointwise(halves)

    def call(number: int) -> None:
        x = torch.linspace(-1.0, 1.0, 3 * 2 * (number + 1)).reshape(3, -1)
        torch.testing.assert_close(fused(x), halves(x))

    run_in_threads(call)


def test_calls_of_foreach_are_right(target: None) -> None:
    fused = pointwise(lambda x: x.mul_(2))

    def call(number: int) -> None:
        for _ in range(5):
            tensors = [torch.full((3 + i,), float(number)) for i in range(3)]
            fused.foreach(tensors)
            for tensor in tensors:
                assert torch.equal(tensor, torch.full_like(tensor, 2.0 * number))

    run_in_threads(call)


def test_calls_during_a_compilation_are_right(target: None) -> None:
    weight = nn.Parameter(torch.full((5,), 3.0))
    fused = pointwise(lambda x: x.sin() * weight, autograd=True)
    torch.compiler.reset()

    def call(number: int) -> None:
        x = torch.arange(5.0) + number
        # `fullgraph` is omitted, because torch rejects it while another thread traces.
        y = torch.compile(lambda x: fused(x) + number, backend="aot_eager")(x) if number % 2 else fused(x) + number
        torch.testing.assert_close(y, x.sin() * weight + number)

    run_in_threads(call)


@pytest.mark.gpu
def test_calls_of_foreach_on_a_gpu_are_right() -> None:
    fused = pointwise(lambda x: x.mul_(2))

    def call(number: int) -> None:
        for _ in range(20):
            tensors = [torch.full((1003 + i,), float(number), device="cuda") for i in range(3)]
            fused.foreach(tensors)
            for tensor in tensors:
                assert torch.equal(tensor, torch.full_like(tensor, 2.0 * number))

    run_in_threads(call)
