"""A short run of `benchmarks/many_neurons.py`. Deleted neurons free all resources that would grow with their number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import many_neurons

WARM_UP, NEURONS = 15, 30  # the first neurons compile every kernel


@pytest.mark.long(all_but=["auto"])
@pytest.mark.parametrize("backend", ["torch", "auto", "triton"])
def test_remaining_resources_do_not_grow(
    backend: str, interpreted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    before, after = many_neurons.held_by(backend, "cpu", WARM_UP, NEURONS)
    assert after.generated == before.generated
    assert after.files == before.files
    assert after.modules == before.modules
    assert after.descriptors <= before.descriptors + 2  # other code of this process may open files
    assert after.handles == before.handles
    # A neuron that is not freed would hold at least 36 objects. torch's context variables hold a few objects of each
    # call.
    assert after.objects < before.objects + 10 * (NEURONS - WARM_UP)
    if backend == "triton":
        assert before.generated > 0
        assert before.files > 0
