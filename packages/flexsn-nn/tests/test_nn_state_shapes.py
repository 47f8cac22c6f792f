"""States whose shapes differ from the step, such as dendrites with a soma. `init_states` defines the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexsn_nn import LIF, FlexSN, StateError

B, N, K = 2, 3, 4
Shape = tuple[int, ...]


class Branched(FlexSN):
    """A neuron whose initial states are zeros of any shapes, for any batch size."""

    def __init__(self, core: Callable[..., Any], shapes: Callable[[int], Sequence[Shape]], **options: Any) -> None:
        super().__init__(core, 1, len(shapes(1)), 1, **options)
        self.shapes = shapes
        self.num_init_calls = 0

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        self.num_init_calls += 1
        batch = inputs[0].shape[1 if step_mode == "m" else 0]
        return [inputs[0].new_zeros(shape) for shape in self.shapes(batch)]


def sums(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Computes a soma `[B, N]` that sums its dendrites `[B, N, K]`."""
    d = 0.5 * d + x.unsqueeze(-1) * torch.arange(1.0, K + 1)
    v = 0.9 * v + d.sum(-1)
    return torch.tanh(v), v, d


def feeds(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Computes branches `[B, N, K]` that one value `[B, N, 1]` drives."""
    v = 0.9 * v + x
    d = 0.5 * d + v * torch.arange(1.0, K + 1)
    return torch.tanh(d), v, d


def alone(x: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Computes branches without a soma. The input has one value for all branches of a neuron."""
    d = 0.5 * d + x * torch.arange(1.0, K + 1)
    return torch.tanh(d), d


def clock(x: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Computes with a state without dimensions, which counts the steps."""
    v = v + x / (1.0 + t)
    return v, t + 1.0, v


CASES: list[tuple[Callable[..., Any], Shape, Callable[[int], Sequence[Shape]]]] = [
    (sums, (N,), lambda b: [(b, N), (b, N, K)]),
    (feeds, (N, 1), lambda b: [(b, N, 1), (b, N, K)]),
    (alone, (N, 1), lambda b: [(b, N, K)]),
    (clock, (N,), lambda b: [(), (b, N)]),
]
cases = pytest.mark.parametrize(("core", "step", "shapes"), CASES, ids=[core.__name__ for core, *_ in CASES])
loops = pytest.mark.parametrize("backend", ["torch", "hop"])


def draw_sequence(steps: int, step: Shape, batch: int = B) -> Tensor:
    return torch.randn(steps, batch, *step, generator=torch.Generator().manual_seed(0))


@cases
@loops
def test_a_call_continues_from_the_states_of_the_previous_call(
    core: Any, step: Shape, shapes: Any, backend: str
) -> None:
    layer = Branched(core, shapes, backend=backend)
    x = draw_sequence(9, step)
    expected = layer(x)
    states = [state.clone() for state in layer.states]
    assert [tuple(state.shape) for state in states] == [*shapes(B)]
    layer.reset()
    num_init_calls = layer.num_init_calls
    parts = torch.cat([layer(part) for part in x.split(2)])
    assert torch.equal(parts, expected)
    assert all(torch.equal(a, b) for a, b in zip(layer.states, states, strict=True))
    # The first part starts from initial states, and stores their shapes. The other parts use the stored shapes.
    assert layer.num_init_calls == num_init_calls + 1
    second_layer = Branched(core, shapes, backend=backend)
    output, new_states = second_layer.step(x[:4])
    rest, _ = second_layer.step(x[4:], new_states)
    assert torch.equal(torch.cat([cast(Tensor, output), cast(Tensor, rest)]), expected)


@cases
def test_single_steps_equal_a_sequence(core: Any, step: Shape, shapes: Any) -> None:
    x = draw_sequence(5, step)
    expected = Branched(core, shapes, backend="torch")(x)
    step_layer = Branched(core, shapes, backend="torch", step_mode="s")
    assert torch.equal(torch.stack([step_layer(part) for part in x]), expected)


@cases
@loops
def test_another_batch_is_refused_with_the_expected_shape(core: Any, step: Shape, shapes: Any, backend: str) -> None:
    layer = Branched(core, shapes, backend=backend)
    layer(draw_sequence(3, step))
    for batch in (1, B + 1):
        expected_shape = next(list(shape) for shape in shapes(batch) if shape)
        with pytest.raises(StateError, match=r"Call reset\(\)") as caught:
            layer(draw_sequence(3, step, batch))
        assert f"for this input it has {expected_shape}" in str(caught.value)
    layer.reset()
    layer(draw_sequence(3, step, B + 1))


def test_a_batch_that_could_be_broadcast_is_refused() -> None:
    layer = LIF()
    layer(torch.ones(2, 3, 5))
    for batch in (1, 4):
        with pytest.raises(StateError, match=rf"state 0 has shape \[3, 5\].*has \[{batch}, 5\]"):
            layer(torch.ones(2, batch, 5))


@pytest.mark.parametrize("backend", ["torch", "hop", "triton", "cpp", "auto"])
def test_branches_without_init_states_are_refused_at_the_first_call(backend: str) -> None:
    layer = FlexSN(sums, 1, 2, 1, backend=backend)
    layer.states = [torch.zeros(B, N), torch.zeros(B, N, K)]
    with pytest.raises(StateError, match=r"state 1 has shape \[2, 3, 4\].*override init_states\(\) to return them"):
        layer(draw_sequence(3, (N,)))


@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_kernels_refuse_a_state_without_dimensions_in_every_call(backend: str, interpreted: None) -> None:
    layer = Branched(clock, lambda b: [(), (b, N)], backend=backend)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="outputs and states of the step have different shapes"):
            layer(draw_sequence(3, (N,)))
