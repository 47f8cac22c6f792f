"""`benchmarks/trace_time.py`: from a step function to kernel source in time that grows with its size, no faster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import trace_time


def test_time_is_close_to_linear_in_the_number_of_ops() -> None:
    """CPU time of one thread, which other work on the machine hardly changes; a square would be 16 times as much."""
    trace_time.source_times(trace_time.chain(20))  # fills torch's own caches
    small, large = (trace_time.source_times(trace_time.chain(nodes)) for nodes in (50, 200))
    assert (small.nodes, large.nodes) == (50, 200)
    assert large.total < 8 * small.total


def test_exponent() -> None:
    rows = [trace_time.Times(n, n**1.5, 0.0, n**1.5) for n in (10, 100, 1000)]
    assert trace_time.exponent(rows) == pytest.approx(1.5)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trace_time, "NODES", (10, 20, 30))
    trace_time.main(tmp_path / "times.md", 1)
    text = (tmp_path / "times.md").read_text()
    assert "| LIF | 8 |" in text
    assert "| chain of 30 | 30 |" in text
    assert capsys.readouterr().out == text
