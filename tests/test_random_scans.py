"""Random steps in `scan`: each lowering equals a plain loop, call after call."""

from __future__ import annotations

import pytest
import torch
from random_steps import compare, random_program

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

# Seeds whose loops shared one constant among calls, when graphs were traced from their source.
SHARED = (13, 26, 27)


@pytest.mark.parametrize("first", [200, 210])
def test_eagerly(first: int) -> None:
    equal = 0
    for seed in range(first, first + 10):
        outcome = compare(random_program(seed), ["eager"])
        assert not outcome.different + outcome.failed, f"seed {seed}: {outcome}"
        equal += not outcome.no_loop
    assert equal >= 5


@pytest.mark.long(all_but=["13-loop", "3-kernels"])
@pytest.mark.parametrize("lowering", ["aot_eager", "loop", "kernels"])
@pytest.mark.parametrize("seed", [*range(13), *SHARED])
def test_compiled(seed: int, lowering: str) -> None:
    outcome = compare(random_program(seed), [lowering])
    assert not outcome.different + outcome.failed, f"{outcome}\n{random_program(seed).source}"
    assert outcome.no_loop or outcome.equal == [lowering]
    torch._dynamo.reset()


def test_a_program_is_that_of_its_seed() -> None:
    one, other = random_program(7), random_program(7)
    assert one.source == other.source
    torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)
    assert random_program(8).source != one.source
