"""Learns how long the warm-up before a segment must be, from the number of wrong guesses in earlier calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_runtime.plans._segments import SegmentRule
from flexsn_runtime.plans._warm_ups import NEVER, Key, load_warm_up, save_warm_up

# The counts of repairs are read in the first `_READ_FIRST` calls, and then in every `_READ_EVERY`-th call.
_READ_FIRST, _READ_EVERY = 8, 64


class Repairs(NamedTuple):
    """The amount of work that was computed again in one call, because guesses were wrong.

    Attributes:
        segments: number of segments that were processed in parallel.
        warm_up: warm-up steps before each segment.
        elements: number of elements that were computed again, added up over all segments.
        total: number of elements of a step, times the number of segments.
    """

    segments: int
    warm_up: int
    elements: int
    total: int


class Speculation:
    """The warm-up of a step's forward, in steps. It doubles when the count of a call shows repairs.

    The warm-up does not exceed the longest warm-up. If it cannot double, a few repairs are accepted; after a call with
    many repairs, the forward becomes serial.

    The counts of repairs are read without waiting: in a later call, after the device has written them. The results of a
    scan do not depend on this delay.

    Args:
        rule: rule with the first and the longest warm-up.
        key: key of the file that stores the warm-up; `None` if it is not stored.

    Attributes:
        last: repairs of the last call whose count was read.
    """

    def __init__(self, rule: SegmentRule, key: Key | None) -> None:
        self._rule, self._key = rule, key
        stored_warm_up = None if key is None else load_warm_up(key)
        self._warm_up = rule.warm_up if stored_warm_up is None else stored_warm_up
        self._is_stored = stored_warm_up is not None
        self.last: Repairs | None = None
        self._calls = 0
        self._pending: tuple[torch.cuda.Event, Tensor, Repairs, tuple[int, int]] | None = None

    @property
    def converges(self) -> bool:
        """False if trajectories from different states are known not to converge within the longest warm-up."""
        return self._warm_up != NEVER

    @property
    def warm_up(self) -> int:
        return self._warm_up

    @property
    def is_known(self) -> bool:
        """True if the first warm-up was loaded from disk, or if the last count that was read shows no repairs."""
        return self._is_stored or (self.last is not None and self.last.elements == 0)

    def count(self, ncl: int, num_steps: int) -> int:
        """Returns the number of segments; 1 for a serial scan."""
        return self._rule.count(ncl, num_steps, self._warm_up) if self.converges else 1

    def observe(self, repairs: Tensor, segments: int, ncl: int, block: int) -> None:
        """Processes the repairs of a call: at once on a CPU, in a later call on a GPU.

        Args:
            repairs: for each program of the kernel, the number of elements that were computed again, added up over all
                segments.
            segments: same as in `Repairs`.
            ncl: elements of a step.
            block: elements of a program.
        """
        if self._pending is not None:
            self._read()
        self._calls += 1
        if self._calls > _READ_FIRST and self._calls % _READ_EVERY:
            return
        call = Repairs(segments, self._warm_up, 0, segments * ncl)
        if repairs.device.type != "cuda":
            self._learn(call._replace(elements=int(repairs.sum())), _find_most_repaired(repairs, ncl, block))
        elif self._pending is None and not torch.cuda.is_current_stream_capturing():
            copy = torch.empty(repairs.shape, dtype=repairs.dtype, device="cpu", pin_memory=True)
            copy.copy_(repairs, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = event, copy, call, (ncl, block)

    def _read(self) -> None:
        assert self._pending is not None
        event, copy, call, sizes = self._pending
        if not torch.cuda.is_current_stream_capturing() and event.query():
            self._pending = None
            self._learn(call._replace(elements=int(copy.sum())), _find_most_repaired(copy, *sizes))

    def _learn(self, call: Repairs, most_repaired: int) -> None:
        """Learns from a call. `most_repaired` is the largest number of segments that one program has repaired."""
        self.last = call
        if call.elements == 0 or call.warm_up != self._warm_up:
            return
        doubled_warm_up = 2 * self._warm_up
        if doubled_warm_up <= self._rule.longest:
            self._warm_up = doubled_warm_up
        elif 4 * (most_repaired + 2) > 3 * call.segments:
            # Warm-up, first pass and repairs take more than 3/4 of the time of a serial scan.
            self._warm_up = NEVER
        else:
            return
        if self._key is not None:
            save_warm_up(self._key, self._warm_up)

    def in_words(self) -> str:
        """Returns a description for users."""
        if not self.converges:
            longest = self._rule.longest
            return f"serial, since trajectories from different states do not converge within {longest} steps"
        shortest, later_calls = self._rule.launched, ""
        if shortest > 1:
            later_calls = (
                f"; outside of CUDA graphs, calls of fewer than {shortest} steps are serial after the first calls"
            )
        if self.last is None:
            return f"segments side by side, each after a warm-up of {self._warm_up} steps{later_calls}"
        last = self.last
        return (
            f"{last.segments} segments side by side, each after a warm-up of {last.warm_up} steps; "
            f"{last.elements} of {last.total} were computed again in the last call whose count was read"
            + ("" if last.warm_up == self._warm_up else f"; the warm-up is now {self._warm_up} steps")
            + later_calls
        )


def _find_most_repaired(repairs: Tensor, ncl: int, block: int) -> int:
    """Returns the largest number of segments that one program has repaired.

    Args:
        repairs, ncl, block: same as for `observe`.
    """
    elements = [min(block, ncl - i * block) for i in range(len(repairs))]
    return max(int(count) // number for count, number in zip(repairs.tolist(), elements, strict=True))
