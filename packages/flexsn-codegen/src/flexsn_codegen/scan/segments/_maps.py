"""The affine map of each segment of time, in kernels that write maps and in kernels that combine them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_codegen.targets import KernelWriter
from flexsn_graph import Port, Role


class SegmentMaps:
    """Affine maps from the values `<prefix>_<i>` before a segment to the values after it, for some states `i`.

    The maps are operands of role `SEGMENT_MAP`. For `S` states, operand `a * S + b` is the derivative of state `a`
    after the segment with respect to state `b` before it, where `a` and `b` are positions in `states`. Operand
    `S * S + a` is state `a` after the segment if all states before it are zero.

    Args:
        writer: writer of the kernel. The maps become parameters of the kernel.
        prefix: `"state"` or `"grad_state"`.
        states: indices of the states.
    """

    def __init__(self, writer: KernelWriter, prefix: str, states: Sequence[int]) -> None:
        self._writer, self._prefix, self._states = writer, prefix, list(states)
        count = len(self._states)
        self._square = count * count
        self._params: list[Port] = [writer.add(Role.SEGMENT_MAP, i) for i in range(self._square + count)]

    def begin(self, dtypes: Sequence[torch.dtype]) -> None:
        """Assigns the derivatives before the first step.

        `column_<j>_<i>` is the derivative of state `i` with respect to state `j`.

        Args:
            dtypes: dtypes of all states.
        """
        w = self._writer
        for j in self._states:
            for i in self._states:
                zeros = w.zeros(dtypes[i])
                w.assign(f"column_{j}_{i}", f"{zeros} + 1" if i == j else zeros)

    def store(self) -> None:
        """Stores the map of segment `segment`: derivatives, and the values after a segment that starts with zeros."""
        w, count = self._writer, len(self._states)
        for a, i in enumerate(self._states):
            for b, j in enumerate(self._states):
                param = self._params[a * count + b]
                w.store(param, f"column_{j}_{i}", w.row(param, "segment"))
            rest = self._params[self._square + a]
            w.store(rest, f"{self._prefix}_{i}", w.row(rest, "segment"))

    def load(self, u: int, row: str, shift: int = 0, exists: str | None = None) -> None:
        """Loads the map of segment `row + shift` as map `u`."""
        w = self._writer
        for n, param in enumerate(self._params):
            w.load(f"map_{n}_{u}", param, w.row(param, row, shift), exists)

    def load_rest(self, row: str, shift: int = 0) -> None:
        """Loads the values after segment `row + shift`, which has started with zeros or with known values."""
        w = self._writer
        for param, i in zip(self._params[self._square :], self._states, strict=True):
            w.load(f"{self._prefix}_{i}", param, w.row(param, row, shift))

    def combine(self, u: int) -> None:
        """Applies map `u` and assigns the results to `next_<i>`. Terms are added in the order of the states."""
        count = len(self._states)
        for a, i in enumerate(self._states):
            terms = [f"map_{a * count + b}_{u} * {self._prefix}_{j}" for b, j in enumerate(self._states)]
            self._writer.assign(f"next_{i}", " + ".join([*terms, f"map_{self._square + a}_{u}"]))

    def advance(self, exists: str) -> None:
        """Replaces the values with the results of `combine` if `exists` holds."""
        for i in self._states:
            self._writer.select(f"{self._prefix}_{i}", exists, f"next_{i}", f"{self._prefix}_{i}")
