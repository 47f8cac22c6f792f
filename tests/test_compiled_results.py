"""Steps that return one value several times, with losses that read some of the results. Scans that Inductor compiles
equal the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from result_subsets import USUAL, combination, compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def test_value_may_be_output_and_state() -> None:
    compare(USUAL[:2])


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("lowering", ["auto", "loop"])
def test_common_combinations_equal_the_loop(lowering: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", lowering)
    compare(USUAL, dynamic=dynamic)


@pytest.mark.long(all_but=["loop-0"])
@pytest.mark.parametrize("first", range(0, 60, 3))
@pytest.mark.parametrize("lowering", ["auto", "loop"])
def test_random_combinations_equal_the_loop(lowering: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", lowering)
    compare([combination(seed) for seed in range(first, first + 3)], dynamic=first % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_common_combinations_equal_the_loop_on_a_gpu(dynamic: bool) -> None:
    compare(USUAL, device="cuda", dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_combinations_equal_the_loop_on_a_gpu(seed: int) -> None:
    compare([combination(seed)], device="cuda")
