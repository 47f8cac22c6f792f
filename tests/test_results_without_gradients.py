"""Results that depend on no tensor that requires a gradient. They require no gradient in kernels and in the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexsn_nn import FlexSN

WEIGHT = 0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(0))


def apart(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Computes two neurons that do not depend on each other."""
    v, w = 0.5 * v + x, 0.5 * w + torch.tanh(y)
    return v * v, w * w, v, w


def onward(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Computes two states. In the next step, the first state affects both new states."""
    return v * y.detach(), w + 1.0, v + x, v * 0.5 + y.detach()


def swapped(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Swaps the states, and returns an output that has no gradient."""
    return v + w.detach() + x.detach(), torch.ones_like(x), w * 0.5, v + 0.1


def recurrent(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Computes a product with a matrix."""
    v, w = 0.5 * v + x, torch.tanh(0.5 * w + y) @ WEIGHT
    return v * v, w * w, v, w


class Learned(torch.nn.Module):
    """A step with a parameter that affects one of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        v, w = 0.5 * v + x, self.scale * w + y
        return v * v, w * w, v, w


CORES = {"apart": apart, "onward": onward, "swapped": swapped, "recurrent": recurrent, "learned": Learned()}
MASKS = [[i == j for j in range(4)] for i in range(4)] + [[False] * 4, [True] * 4]


@pytest.mark.long(all_but=["recurrent-final states", "onward-all states"])
@pytest.mark.parametrize("store_states", [False, True], ids=["final states", "all states"])
@pytest.mark.parametrize("core", list(CORES))
def test_results_require_grad_as_in_the_loop(core: str, store_states: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    results: dict[str, list[tuple[bool, ...]]] = {}
    gradients: dict[str, list[Tensor | None]] = {}
    cases = [(mask, steps) for mask in MASKS for steps in (1, 2, 5)]
    values_by_case = [
        [torch.randn(*shape, 3, 5, generator=generator) for shape in ((t,), (t,), (), ())] for _, t in cases
    ]
    for backend in ("torch", "cpp"):
        neuron = FlexSN(CORES[core], 2, 2, 2, backend=backend, store_state_seqs=store_states)  # type: ignore[arg-type]
        results[backend], gradients[backend] = [], []
        for _ in range(2):  # the second call runs the stored plan of the first call
            for (mask, _), values in zip(cases, values_by_case, strict=True):
                leaves = [value.clone().requires_grad_(required) for value, required in zip(values, mask, strict=True)]
                neuron.states = leaves[2:]
                outputs = [*neuron(*leaves[:2]), *neuron.states, *neuron.state_seqs]
                results[backend].append(tuple(t.requires_grad for t in outputs))
                total = sum((t.sum() for t in outputs if t.requires_grad), torch.zeros(()))
                if total.requires_grad:
                    total.backward()
                gradients[backend] += [t.grad for t in leaves]
    assert results["cpp"] == results["torch"]
    assert {requires_grad for case in results["torch"] for requires_grad in case} == {False, True}
    for actual, expected in zip(gradients["cpp"], gradients["torch"], strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)
