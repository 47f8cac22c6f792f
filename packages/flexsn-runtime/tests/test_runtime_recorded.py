"""A repeated recording computes the results of other tensors. Calls that cannot be repeated have a reason."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexsn_runtime.calls._recorded import (
    Recording,
    not_repeated,
    noted,
    recorded,
    same_in_each_call,
    written_by_kernel,
)


def launch(tensors: Sequence[Tensor], factor: float) -> None:
    """A stand-in for a kernel. No operator shows that it writes to memory."""
    x, into = tensors
    into.flatten()[: x.numel()].copy_(factor * x.flatten())


def compute(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    x, matrix, _ = tensors
    assert x is not None
    assert matrix is not None
    transposed = matrix.detach().t()
    memory, zeros = torch.empty(4, *x.shape), torch.zeros(2, 3)
    memory[0].zero_()
    memory[1:3].copy_(x)
    noted(launch, [x, memory[3]], 2.0)
    torch.full((5,), 1.0)  # the result is not used
    first, second = memory[1:].unbind(0)[:2]
    torch.mm(first, transposed, out=memory[0])
    copies = [torch.empty_strided((2, 3), (1, 2)) for _ in range(2)]
    torch._foreach_copy_(copies, [second, memory[3]])
    return [memory[0], None, *copies, x, zeros.add_(x.sum(0)), noted(torch.mul, x, 3.0), memory.view(-1)[1:].clone()]


def draw_tensors(seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator), torch.randn(3, 3, generator=generator).requires_grad_(), None]


def are_equal(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_repeated_recording_is_freed_without_a_collection() -> None:
    constants = [torch.ones(3)]

    def call(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [same_in_each_call(constants[0]).add(cast(Tensor, tensors[0]))]

    with torch.no_grad():
        _, recording = recorded(call, [torch.ones(3)])
    assert isinstance(recording, Recording)
    assert torch.equal(recording.repeat([torch.ones(3)])[0], torch.full((3,), 2.0))
    reference = weakref.ref(constants[0])
    gc.disable()
    try:
        del recording
        constants.clear()
        assert reference() is None
    finally:
        gc.enable()


def test_recording_advances_the_version_of_tensors_that_a_kernel_writes() -> None:
    def call(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        x, total = tensors
        assert x is not None
        assert total is not None
        noted(launch, [x, total], 3.0)
        written_by_kernel([total])
        return [2 * x]

    total = torch.zeros(3)
    _, recording = recorded(call, [torch.ones(3), total])
    assert isinstance(recording, Recording)
    before = total._version
    recording.repeat([torch.ones(3), total])
    assert total._version > before + 1  # once by the stand-in's copy, and once by the recording


@torch.no_grad()
def test_recorded_call_computes_results_of_other_tensors() -> None:
    first = draw_tensors(0)
    results, recording = recorded(compute, first)
    assert isinstance(recording, Recording)
    repeat = recording.repeat
    assert are_equal(results, compute(first))
    for seed in (1, 2):
        tensors = draw_tensors(seed)
        actual, expected = repeat(tensors), compute(tensors)
        assert are_equal(actual, expected)
        assert [None if t is None else t.stride() for t in actual] == [
            None if t is None else t.stride() for t in expected
        ]
        assert actual[4] is tensors[0]
    assert not are_equal(repeat(draw_tensors(1)), repeat(draw_tensors(2)))
    assert are_equal(results, compute(first))  # each call allocates new memory


@torch.no_grad()
def test_tensor_that_is_passed_twice_may_differ_in_the_next_call() -> None:
    x, y = torch.rand(3), torch.rand(3)

    def call(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        first, second = cast(list[Tensor], tensors)
        return [first - 2 * second]

    results, recording = recorded(call, [x, x])
    assert isinstance(recording, Recording)
    assert are_equal(results, [-x])
    assert are_equal(recording.repeat([x, y]), [x - 2 * y])


def silent(x: Tensor) -> list[Tensor]:
    memory = torch.empty_like(x)
    with torch.utils._python_dispatch._disable_current_modes():
        launch([x, memory], 2.0)
    return [memory]


def refusing(x: Tensor) -> list[Tensor]:
    not_repeated("it refuses")
    return [x]


def read(x: Tensor) -> list[Tensor]:
    return [x * x.sum().item()]


ELSEWHERE = torch.ones(3)
REFUSED: dict[str, tuple[Callable[[Tensor], list[Tensor]], str]] = {
    "a launch that is not recorded": (silent, "not recorded"),
    "a launch whose result is read": (lambda x: [silent(x)[0] + 1], "not recorded"),
    "a number": (read, "not a tensor"),
    "another tensor": (lambda x: [x + ELSEWHERE], "not among its arguments"),
    "another tensor as a result": (lambda x: [ELSEWHERE], "not among its arguments"),
    "a call that refuses": (refusing, "it refuses"),
    "shapes that depend on values": (lambda x: [x[x > 1]], "depends on values"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_unrepeatable_calls_return_results_and_a_reason(name: str) -> None:
    call, reason = REFUSED[name]
    x = torch.arange(3.0)
    results, repeat = recorded(lambda tensors: call(cast(Tensor, tensors[0])), [x])
    assert isinstance(repeat, str)
    assert reason in repeat
    assert are_equal(results, call(x))


def test_error_of_the_call_ends_the_recording() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="shape"):
        recorded(lambda tensors: [cast(Tensor, tensors[0]).view(2)], [x])
    assert noted(torch.add, x, 1).tolist() == [2.0] * 3
    assert isinstance(recorded(lambda tensors: [cast(Tensor, tensors[0]) + 1], [x])[1], Recording)
