"""Calls that are recorded and repeated. The results are right for other tensors, or there is a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexsn_runtime.calls._recorded import Recording, not_repeated, noted, recorded


def launch(tensors: Sequence[Tensor], factor: float) -> None:
    """A stand-in for a kernel. No operator shows that it writes to memory."""
    x, into = tensors
    into.flatten()[: x.numel()].copy_(factor * x.flatten())


def computed(given: Sequence[Tensor | None]) -> list[Tensor | None]:
    x, matrix, _ = given
    assert x is not None
    assert matrix is not None
    fixed = matrix.detach().t()
    memory, zeros = torch.empty(4, *x.shape), torch.zeros(2, 3)
    memory[0].zero_()
    memory[1:3].copy_(x)
    noted(launch, [x, memory[3]], 2.0)
    torch.full((5,), 1.0)  # this is never read
    first, second = memory[1:].unbind(0)[:2]
    torch.mm(first, fixed, out=memory[0])
    copies = [torch.empty_strided((2, 3), (1, 2)) for _ in range(2)]
    torch._foreach_copy_(copies, [second, memory[3]])
    return [memory[0], None, *copies, x, zeros.add_(x.sum(0)), noted(torch.mul, x, 3.0), memory.view(-1)[1:].clone()]


def given(seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator), torch.randn(3, 3, generator=generator).requires_grad_(), None]


def equal(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@torch.no_grad()
def test_a_recorded_call_computes_results_of_other_tensors() -> None:
    first = given(0)
    results, recording = recorded(computed, first)
    assert isinstance(recording, Recording)
    repeat = recording.repeat
    assert equal(results, computed(first))
    for seed in (1, 2):
        tensors = given(seed)
        found, wanted = repeat(tensors), computed(tensors)
        assert equal(found, wanted)
        assert [None if t is None else t.stride() for t in found] == [None if t is None else t.stride() for t in wanted]
        assert found[4] is tensors[0]
    assert not equal(repeat(given(1)), repeat(given(2)))
    assert equal(results, computed(first))  # each call has its own memory


@torch.no_grad()
def test_a_tensor_that_is_passed_twice_may_differ_in_the_next_call() -> None:
    x, y = torch.rand(3), torch.rand(3)

    def call(given: Sequence[Tensor | None]) -> list[Tensor]:
        first, second = cast(list[Tensor], given)
        return [first - 2 * second]

    results, recording = recorded(call, [x, x])
    assert isinstance(recording, Recording)
    assert equal(results, [-x])
    assert equal(recording.repeat([x, y]), [x - 2 * y])


def silent(x: Tensor) -> list[Tensor]:
    memory = torch.empty_like(x)
    with torch.utils._python_dispatch._disable_current_modes():
        launch([x, memory], 2.0)
    return [memory]


def asking(x: Tensor) -> list[Tensor]:
    not_repeated("it asks")
    return [x]


def read(x: Tensor) -> list[Tensor]:
    return [x * x.sum().item()]


ELSEWHERE = torch.ones(3)
REFUSED: dict[str, tuple[Callable[[Tensor], list[Tensor]], str]] = {
    "a launch that is not noted": (silent, "not noted"),
    "a launch whose result is read": (lambda x: [silent(x)[0] + 1], "not noted"),
    "a number": (read, "more than tensors"),
    "another tensor": (lambda x: [x + ELSEWHERE], "not given"),
    "another tensor as a result": (lambda x: [ELSEWHERE], "not given"),
    "what says so": (asking, "it asks"),
    "shapes that numbers decide": (lambda x: [x[x > 1]], "numbers decide"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_unrepeatable_calls_return_results_and_a_reason(name: str) -> None:
    call, why = REFUSED[name]
    x = torch.arange(3.0)
    results, repeat = recorded(lambda given: call(cast(Tensor, given[0])), [x])
    assert isinstance(repeat, str)
    assert why in repeat
    assert equal(results, call(x))


def test_an_error_of_the_call_ends_the_recording() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="shape"):
        recorded(lambda given: [cast(Tensor, given[0]).view(2)], [x])
    assert noted(torch.add, x, 1).tolist() == [2.0] * 3
    assert isinstance(recorded(lambda given: [cast(Tensor, given[0]) + 1], [x])[1], Recording)
