"""Checks that kernels can write bits of outputs."""

from __future__ import annotations

from collections.abc import Sequence

from flexsn_graph import StepTrace, location_of, not_zero_one
from flexsn_runtime.errors import SpikeBitsError


def check_bits(trace: StepTrace, bits: Sequence[bool]) -> None:
    """Raises `SpikeBitsError` unless all values of the outputs are known to be 0 or 1.

    Args:
        bits: for each output, True to check this output. An empty sequence checks no output.
    """
    for i, is_bits in enumerate(bits):
        node = not_zero_one(trace.forward, i) if is_bits else None
        if node is None:
            continue
        location = location_of(node)
        origin = "is an argument of the step" if node.op == "placeholder" else f"is made by {node.target}"
        raise SpikeBitsError(
            f"output {i} is not known to be 0 or 1, so its bits cannot be written: part of it {origin}"
            f"{'' if location is None else f', called at {location}'}. Return the result of a comparison, converted to "
            "the output's dtype."
        )
