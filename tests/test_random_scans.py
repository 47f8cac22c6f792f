"""Random steps in `scan`. Each lowering equals a plain loop in several calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_steps import compare, random_program
from torch import Tensor

from flexsn_hop import scan

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

# Seeds of programs whose loops once shared one constant in all calls, because graphs were traced from their source.
SHARED_CONSTANTS = (13, 26, 27)
# Seeds of programs whose kernels once failed or were wrong, because a gradient was written into zeros, or a broadcast
# value was copied.
FORMER_FAULTS = (160, 208)


@pytest.mark.parametrize("first", [200, 210])
def test_eager_scan_equals_the_loop(first: int) -> None:
    equal = 0
    for seed in range(first, first + 10):
        outcome = compare(random_program(seed), ["eager"])
        assert not outcome.different + outcome.failed, f"seed {seed}: {outcome}"
        equal += not outcome.no_loop
    assert equal >= 5


@pytest.mark.long(all_but=["13-loop", "3-kernels"])
@pytest.mark.parametrize("lowering", ["aot_eager", "loop", "kernels"])
@pytest.mark.parametrize("seed", [*range(13), *SHARED_CONSTANTS, *FORMER_FAULTS])
def test_compiled_scan_equals_the_loop(seed: int, lowering: str) -> None:
    outcome = compare(random_program(seed), [lowering])
    assert not outcome.different + outcome.failed, f"{outcome}\n{random_program(seed).source}"
    assert outcome.no_loop or outcome.equal == [lowering]
    torch._dynamo.reset()


def test_seed_determines_the_program() -> None:
    program, repeated = random_program(7), random_program(7)
    assert program.source == repeated.source
    torch.testing.assert_close(program.tensors(), repeated.tensors(), rtol=0, atol=0)
    assert random_program(8).source != program.source


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.mean(-1, keepdim=True),
    "amax": lambda v: v.amax(-1),
    "amin": lambda v: v.amin(0),
    "softmax": lambda v: v.softmax(0) * v,
    "log_softmax": lambda v: v.log_softmax(-1) + v,
    "logsumexp": lambda v: v.logsumexp(0),
    "var": lambda v: v.var(-1, correction=0) + v,
    "norm": lambda v: torch.linalg.vector_norm(v, dim=0),
}


@pytest.mark.long(all_but=["softmax", "var"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_states_without_dimensions_may_be_reduced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks reductions over the dimensions 0 and -1, which PyTorch accepts for 0-d tensors. Kernels once failed for
    such reductions.
    """
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "kernel")
    torch._dynamo.reset()
    reduce = REDUCTIONS[name]

    def run(init: Tensor, xs: Tensor) -> Any:
        return scan(lambda v, x: (torch.tanh(reduce(v)) + 0.3 * v * x, reduce(v)), init, xs)

    leaves = [torch.tensor(0.4, dtype=torch.float64), torch.rand(3, dtype=torch.float64)]
    for leaf in leaves:
        leaf.requires_grad_()
    expected, results = run(*leaves), torch.compile(run, fullgraph=True)(*leaves)
    torch.testing.assert_close(results, expected)
    gradients = [torch.autograd.grad(carry + ys.sum(), leaves) for carry, ys in (results, expected)]
    torch.testing.assert_close(*gradients)
