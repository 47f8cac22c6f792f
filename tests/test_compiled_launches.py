"""Inductor's code for compiled scans. The code launches kernels directly, has one graph for all sizes, makes no copies
that only change a layout, and does not fuse products with sums.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("compiled_launches")

SCRIPT = Path(__file__).with_name("compiled_launches.py")


@pytest.fixture(scope="module")
def results() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The child process needs the folders that pytest has added to the path.
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_each_scan_is_one_launch_per_direction(results: Any) -> None:
    # Inductor compiles each kernel once more, to determine which memory the kernel writes to.
    assert {key: results["direct"][key] for key in ("launches", "loops", "warnings", "analyses")} == {
        "launches": [1, 1],
        "loops": 0,
        "warnings": 0,
        "analyses": 2,
    }


def test_new_lengths_and_batches_are_not_compiled_again(results: Any) -> None:
    assert results["dynamic"] == [1, 1, 1, 1, 1]


def test_graph_for_one_length_compiles_only_needed_code(results: Any) -> None:
    # Four steps are one chunk. In longer sequences, a chunk has eight steps.
    assert results["rests"] == [False, False]  # forward and backward, for scans of 4 and 16 steps
    assert results["direct"]["rests"] == [True, True]  # forward and backward, for a scan of 20 steps


def test_large_steps_are_processed_by_rows(results: Any) -> None:
    (forward, _), (backward, arguments) = results["rows"]
    assert (forward, backward) == ("scan_forward", "scan_backward")
    steps, elements, _, channels, _, rows, row, *grid = (
        argument for argument in arguments if not isinstance(argument, list)
    )
    assert (steps, elements, channels) == (2, 16384 * 64, 64)
    assert rows > 1
    assert rows * row == elements
    assert grid == [row // 512, 1, 1]


def test_channels_last_needs_no_layout_copies(results: Any) -> None:
    launches = results["channels_last"]["launches"]
    assert [name for name, _ in launches] == ["scan_forward"] * 2 + ["scan_backward"] * 2
    # strides of a tensor [5, 2, 4, 6, 8]: in channels-last order, and contiguous
    dense, contiguous = [384, 192, 1, 32, 4], [384, 192, 48, 8, 1]
    for i, (_, arguments) in enumerate(launches):
        # AOTAutograd chooses the layout of an incoming gradient. In torch 2.11, the gradient is contiguous. Kernels
        # read the gradient without a copy.
        allowed = (dense, dense[1:], contiguous) if i == 2 else (dense, dense[1:])
        strides = [argument for argument in arguments if isinstance(argument, list)]
        numbers = [argument for argument in arguments if not isinstance(argument, list)]
        # The initial state is zero, and kernels do not read it. No other tensor is strided, so kernels take no strides
        # as arguments.
        assert all(stride in allowed for stride in strides)
        assert numbers[:2] == [5, 384]
        assert len(numbers) == 5 or contiguous in strides  # T, elements, and the grid
    assert results["channels_last"]["copies"] == [[], []]


def test_products_are_rounded_and_keep_subnormals(results: Any) -> None:
    counts = results["inexact"]
    assert counts["fused"] > 0  # by default, Triton fuses
    assert counts["strict"] == counts["standalone"] == 0
