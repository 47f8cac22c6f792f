"""Selects the launch of a forward scan in segments that its step allows."""

from __future__ import annotations

import torch

from flexsn_codegen import CoreSource, ForwardSpec
from flexsn_graph import ends_early
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.segments._affine import SegmentedAffine
from flexsn_runtime.segments._choice import AheadChoice, Choice, has_enough, speculation
from flexsn_runtime.segments._forward import ForwardAhead, SegmentedForward
from flexsn_runtime.segments._kernels import SerialScan
from flexsn_runtime.step._pointwise_step import Specialization

_WIDE = (torch.float32, torch.float64)


def in_segments(scan: SerialScan[ForwardSpec], core: CoreSource, choice: Choice | AheadChoice) -> Launch:
    """The launches of a forward scan in segments, or the launch of its serial kernel.

    Exact steps speculate. With fast math, different kernels compute the same step with different bits, so guesses
    cannot be compared; but sums may have any order then, and affine steps combine. If sequences end by a mask, as in
    compiled graphs, all guesses of segments after their ends would be wrong, so such a scan is serial.

    Args:
        scan: the scan.
        core: the core of its kernel.
    """
    step = scan.step
    if _ends_by_mask(step):
        return scan.launch
    if isinstance(choice, AheadChoice):
        return scan.launch if step.numerics.fast_math else ForwardAhead(scan, core, choice.number, choice.warm_up)
    if not step.numerics.fast_math:
        return SegmentedForward(scan, core, speculation(step, choice))
    segments = min(choice.number, scan.sizes["T"] // scan.config.chunk)
    if has_enough(len(scan.spec.states), choice) and segments > 1 and all(d in _WIDE for d in step.state_dtypes):
        found = step.linear()
        if found is not None:
            return SegmentedAffine(scan, core, found[1], segments)
    return scan.launch


def _ends_by_mask(step: Specialization) -> bool:
    """True if steps do nothing where an integer input, which is not known to count down, is 0 or less."""
    inputs = [i for i, value in enumerate(step.trace.inputs) if value.dtype == torch.int32 and i not in step.counts]
    return any(ends_early(step.trace.forward, [i]) for i in inputs)
