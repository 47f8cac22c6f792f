"""`benchmarks/trace_time.py`: the work to trace a step and write its source is proportional to the size of the step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import trace_time


def count_calls(nodes: int) -> int:
    """Returns the number of function calls, in Python and in C, that trace a step and write its source."""
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    step = trace_time.chain(nodes)
    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        times = trace_time.source_times(step)
    finally:
        sys.setprofile(before)
    assert times.nodes == nodes
    return count


@pytest.mark.long
def test_work_is_close_to_linear_in_the_number_of_ops() -> None:
    """Compares the numbers of function calls for two steps, one of which has four times the number of ops.

    If the work were quadratic, the larger step would need 16 times the calls.
    """
    trace_time.source_times(trace_time.chain(20))  # fills torch's caches before the count
    assert count_calls(200) < 5 * count_calls(50)


def test_exponent_of_the_times_is_fitted() -> None:
    rows = [trace_time.Times(n, n**1.5, 0.0, n**1.5) for n in (10, 100, 1000)]
    assert trace_time.exponent(rows) == pytest.approx(1.5)


def test_table_is_printed_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_time, "NODES", (10, 20, 30))
    trace_time.main(tmp_path / "times.md", 1)
    text = (tmp_path / "times.md").read_text()
    assert "| LIF | 8 |" in text
    assert "| chain of 30 | 30 |" in text
    assert capsys.readouterr().out == text
