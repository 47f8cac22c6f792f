"""Step functions, and an eager loop as the reference, so that these tests do not need flexsn_hop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime import ScanProgram, prepare, scan

Core = Callable[..., Any]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# In the interpreter, this step has three blocks of 512 elements and a partial block.
STEP = (41, 37)


def soft_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A smooth step, without functions whose rounding varies in eager mode."""
    h = v + (x - v) / 2.0
    s = (h - 0.5).clamp(0.0, 1.0)
    return s, h * (1.0 - s)


def hard_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A step whose output is not differentiable, and whose state is differentiable."""
    h = v + (x - v) / 2.0
    s = (h >= 0.5).to(h.dtype)
    return s, h * (1.0 - s)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def loop(core: Core, num_outputs: int, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns `(*output_seqs, *state_seqs)` of a plain loop, which is the reference."""
    rows = []
    for slices in zip(*(x.unbind(0) for x in inputs), strict=True):
        values = core(*slices, *states)
        states = values[num_outputs:]
        rows.append(values)
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def compiled(
    core: Core | ScanProgram,
    num_outputs: int,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    state_seqs: bool = True,
) -> tuple[Tensor, ...]:
    program = core if isinstance(core, ScanProgram) else program_of(core, inputs, states, num_outputs)
    step, arguments = prepare(program, (*inputs, *states))
    return scan(step, arguments, state_seqs=state_seqs)


def program_of(core: Core, inputs: Sequence[Tensor], states: Sequence[Tensor], num_outputs: int) -> ScanProgram:
    return ScanProgram(core, len(inputs), len(states), num_outputs)


def assert_like_the_loop(
    core: Core,
    num_outputs: int,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    captured: Sequence[Tensor] = (),
    rtol: float = 1e-5,
) -> None:
    """Compares results bitwise, and the gradients of a randomly weighted sum of all results up to rounding."""
    actual = compiled(core, num_outputs, inputs, states)
    expected = loop(core, num_outputs, inputs, states)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"result {i}: {int((a != b).sum())} of {a.numel()} differ"
    leaves = [t for t in (*inputs, *states, *captured) if t.requires_grad]
    if not leaves:
        return
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if b.requires_grad]
    assert all(a.requires_grad for a, _ in pairs)
    weights = [torch.rand_like(b) - 0.3 for _, b in pairs]
    gradients = torch.autograd.grad([a for a, _ in pairs], leaves, weights)
    expected_gradients = torch.autograd.grad([b for _, b in pairs], leaves, weights)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(b.abs().max().item(), 1e-6))
