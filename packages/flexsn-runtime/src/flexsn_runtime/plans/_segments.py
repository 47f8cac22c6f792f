"""The number of segments of time that are processed in parallel, by the size of a step and the number of steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Kernels multiply a segment's index by its number of steps in 32 bits. These products stay below this number.
_MOST = 2**31


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """Conditions under which segments pay off, and the number of segments.

    Attributes:
        elements: product of the number of segments and the elements per step with which a scan fills the device.
        largest: maximum elements of a step. A larger step fills the device without segments.
        moved: a step that reads and writes at least this number of bytes keeps the memory busy without segments.
        shortest: minimum steps of a sequence.
        launched: minimum steps of a sequence in calls outside of CUDA graphs, where Python launches each kernel. The
            first calls, which learn warm-ups, are exempt.
        steps: minimum steps of a segment.
        fewest: minimum number of segments. With fewer segments, the second pass does not pay off.
        most: maximum number of segments.
        warm_up: initial number of warm-up steps before a segment.
        longest: maximum number of warm-up steps. If a sequence needs more steps, the forward is serial.
        is_stored: True if learned warm-ups are stored on disk.
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
    is_stored: bool = False

    def count(self, ncl: int, num_steps: int, warm_up: int = 0) -> int:
        """Returns the number of segments. If it is 1, the sequence is not divided.

        Args:
            ncl: elements of a step.
            warm_up: warm-up steps before each segment. A segment has at least this number of steps.
        """
        if ncl > self.largest or num_steps < self.shortest:
            return 1
        most = min(self.most, _MOST // num_steps)
        number = min(self.elements // ncl, num_steps // max(self.steps, warm_up), most)
        return number if number >= self.fewest else 1


# Measured on an H100 with LIF, see benchmarks/long_sequences.py. A step of a serial kernel takes at least its latency,
# even if it moves few bytes. With 2048 elements in float32, serial training takes 5.6 times as long as a copy, and
# training in segments takes 1.9 times as long. With 8192 elements in bfloat16, the factors are 4.8 and 2.2. With 8192
# elements in float32, the factors are 1.6 and 1.8. One program checks all segments of its elements, so too many
# segments increase the time again. In CUDA graphs, 512 steps in segments are 1.3 to 1.7 times faster than 512 serial
# steps. Python launches a call in segments in 66 us and a training step in 245 us. In these times, serial kernels
# compute 2,200 and 2,900 steps: see benchmarks/results/short_segments.md.
ON_GPU = SegmentRule(
    elements=2**16, largest=2**13, moved=2**16, shortest=2**9, launched=3 * 2**10, most=2**10, is_stored=True
)

# Elements of the smallest program on the CPU, and minimum steps of a segment. Such a segment takes several
# milliseconds, so compiling kernels for segments pays off.
_PROGRAM, _STEPS = 256, 2**15


@functools.cache
def for_threads(threads: int) -> SegmentRule | None:
    """Returns the rule for this number of threads, for steps with too few elements to use all threads.

    Returns `None` if there is only one thread.
    """
    if threads < 2:
        return None
    largest = _PROGRAM * (threads // 2)
    return SegmentRule(elements=2**63, largest=largest, steps=_STEPS, fewest=2, most=threads, is_stored=True)


_replacements: list[SegmentRule | None] = []


def rule_in_place_of(usual: SegmentRule | None) -> SegmentRule | None:
    """Returns the rule of the innermost active `using_segments`; the usual rule if no such context is active."""
    return _replacements[-1] if _replacements else usual


@contextmanager
def using_segments(rule: SegmentRule | None) -> Iterator[None]:
    """Replaces the rule for calls in a `with` block, in tests and measurements.

    If `rule` is `None`, no call in the block has segments.
    """
    _replacements.append(rule)
    try:
        yield
    finally:
        _replacements.pop()
