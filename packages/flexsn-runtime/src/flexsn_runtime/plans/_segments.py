"""How many segments of time are walked side by side, by the size of a step and the number of steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Products of a segment's number and steps, which kernels compute in 32 bits, are below it.
_MOST = 2**31


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """When segments pay, and how many.

    Attributes:
        elements: of a step, times segments: the number that fills the device.
        largest: elements of a step; larger ones fill it by themselves.
        moved: bytes that a step reads and writes; from this number on, steps keep the memory busy by themselves.
        shortest: steps of a sequence, at the least.
        launched: steps of a sequence, at the least, in calls outside of CUDA graphs, where Python launches each kernel;
            but for the first calls, in which warm-ups are learned.
        steps: of a segment, at the least.
        fewest: segments; fewer are not worth the second pass.
        most: segments.
        warm_up: steps before a segment, at first.
        longest: warm-up in steps; where more would be needed, the forward is serial.
        kept: True if learned warm-ups are kept on disk.
    """

    elements: int
    largest: int
    moved: int = 2**63
    shortest: int = 1
    launched: int = 1
    steps: int = 128
    fewest: int = 4
    most: int = 2**31
    warm_up: int = 64
    longest: int = 2048
    kept: bool = False

    def count(self, ncl: int, num_steps: int, warm_up: int = 0) -> int:
        """The number of segments; 1: none.

        Args:
            ncl: elements of a step.
            warm_up: steps that each segment begins earlier; segments are no shorter than that.
        """
        if ncl > self.largest or num_steps < self.shortest:
            return 1
        most = min(self.most, _MOST // num_steps)
        number = min(self.elements // ncl, num_steps // max(self.steps, warm_up), most)
        return number if number >= self.fewest else 1


# Measured on an H100 with LIF, see benchmarks/long_sequences.py. A step of a serial kernel takes its latency, however
# few bytes it moves: in training, 5.6 of the copy's time with 2048 elements in float32 and 4.8 with 8192 in bfloat16,
# where segments take 1.9 and 2.2, but 1.6 with 8192 in float32, where they take 1.8. One program looks at all segments
# of its elements, so that more segments take longer again. In CUDA graphs, 512 steps take 1.3 to 1.7 times less than
# serially. Python launches a call in segments in 66 us and a training step in 245, which serial kernels take over 2,200
# and 2,900 steps: see benchmarks/results/short_segments.md.
ON_GPU = SegmentRule(
    elements=2**16, largest=2**13, moved=2**16, shortest=2**9, launched=3 * 2**10, most=2**10, kept=True
)

# Elements of the smallest program on the CPU. Steps of a segment take some ms, so that compiling for them pays.
_PROGRAM, _STEPS = 256, 2**15


@functools.cache
def for_threads(threads: int) -> SegmentRule | None:
    """Segments for threads that a step has too few elements for."""
    if threads < 2:
        return None
    largest = _PROGRAM * (threads // 2)
    return SegmentRule(elements=2**63, largest=largest, steps=_STEPS, fewest=2, most=threads, kept=True)


_instead: list[SegmentRule | None] = []


def rule_in_place_of(usual: SegmentRule | None) -> SegmentRule | None:
    """The rule of `using_segments`, or else the usual one."""
    return _instead[-1] if _instead else usual


@contextmanager
def using_segments(rule: SegmentRule | None) -> Iterator[None]:
    """Replaces the rule for calls in the block; `None`: none have segments. For tests and measurements."""
    _instead.append(rule)
    try:
        yield
    finally:
        _instead.pop()
