"""Activation checkpointing is either correct or refused, but never silently wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexsn_nn import LIF, StateError

backends = pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
reentrant = pytest.mark.parametrize("reentrant", [False, True])
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_problem() -> tuple[Tensor, Tensor]:
    x = 3 * torch.rand(6, 4, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(6.0)[:, None, None]
    return x.to(DEVICE).requires_grad_(), weights.to(DEVICE)


def reset_before_call(neuron: LIF) -> Callable[[Tensor], Tensor]:
    """Returns a function that resets the neuron and then calls it."""

    def run(x: Tensor) -> Tensor:
        neuron.reset()
        output: Tensor = neuron(x)
        return output

    return run


@backends
@reentrant
def test_checkpoints_of_steps_and_of_calls_after_a_reset_are_correct(backend: str, reentrant: bool) -> None:
    neuron = LIF(backend=backend)
    x, weights = make_problem()
    (expected,) = torch.autograd.grad((neuron(x) * weights).sum(), x)

    for function in (lambda x: neuron.step(x)[0], reset_before_call(neuron)):
        x.grad = None
        output: Tensor = checkpoint(function, x, use_reentrant=reentrant)
        (output * weights).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected)


@backends
@reentrant
def test_checkpoints_of_several_calls_after_a_reset_are_correct(backend: str, reentrant: bool) -> None:
    neuron = LIF(backend=backend)
    x, weights = make_problem()
    (expected,) = torch.autograd.grad((neuron(x) * weights).sum(), x)

    def in_chunks(x: Tensor) -> Tensor:
        neuron.reset()
        return torch.cat([neuron(chunk) for chunk in x.split(2)])

    output: Tensor = checkpoint(in_chunks, x, use_reentrant=reentrant)
    (output * weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


@backends
@reentrant
@pytest.mark.parametrize("reset", [False, True])
def test_a_second_run_from_another_state_is_refused(backend: str, reentrant: bool, reset: bool) -> None:
    neuron = LIF(backend=backend)
    x, weights = make_problem()
    neuron(x.detach())
    output: Tensor = checkpoint(neuron, x, use_reentrant=reentrant)
    if reset:  # A reset before the second run does not help, because the first run began with another state.
        neuron.reset()
    with pytest.raises(StateError, match=r"checkpointing.*Checkpoint neuron\.step, or a function that calls reset"):
        (output * weights).sum().backward()


@pytest.mark.filterwarnings("ignore:one LIF is in two places")
@backends
@reentrant
@pytest.mark.parametrize("resets_first", [False, True])
def test_a_reset_in_another_function_does_not_count(backend: str, reentrant: bool, resets_first: bool) -> None:
    """Checkpoints two functions, of which one resets. With `resets_first`, the function that resets runs first."""
    neuron = LIF(backend=backend)
    x, weights = make_problem()
    before = neuron(x.detach())[-1]

    functions: list[Callable[..., Tensor]] = [neuron, reset_before_call(neuron)]
    y = x + before
    for function in reversed(functions) if resets_first else functions:
        y = checkpoint(function, y, use_reentrant=reentrant)
    with pytest.raises(StateError, match="checkpointing"):
        (y * weights).sum().backward()


@pytest.mark.filterwarnings("ignore:one LIF is in two places")
@backends
def test_a_reset_outside_of_a_nested_checkpoint_does_not_count(backend: str) -> None:
    neuron = LIF(backend=backend)
    x, weights = make_problem()

    def outer(x: Tensor) -> Tensor:
        neuron.reset()
        first: Tensor = checkpoint(neuron, x, use_reentrant=False)
        second: Tensor = neuron(first)
        return second

    output: Tensor = checkpoint(outer, x, use_reentrant=False)
    with pytest.raises(StateError, match="checkpointing"):
        (output * weights).sum().backward()
