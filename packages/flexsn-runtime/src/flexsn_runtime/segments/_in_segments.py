"""Selects the launch for a forward scan in segments, depending on the step."""

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
    """Returns the launch of a forward scan in segments, or the launch of its serial kernel.

    Without fast math, kernels guess the states before segments. With fast math, guesses cannot be compared, because
    different kernels compute the same step with different bits. However, fast math allows any order of a sum, so the
    segments of an affine step are combined. In compiled graphs, a mask may mark the ends of sequences. Such a scan is
    serial, because all guesses for segments after these ends would be wrong.

    Args:
        scan: the scan to run in segments.
        core: core of the scan's kernel.
    """
    step = scan.step
    if _is_ended_by_mask(step):
        return scan.launch
    if isinstance(choice, AheadChoice):
        return scan.launch if step.numerics.fast_math else ForwardAhead(scan, core, choice.number, choice.warm_up)
    if not step.numerics.fast_math:
        return SegmentedForward(scan, core, speculation(step, choice))
    segments = min(choice.number, scan.sizes["T"] // scan.config.chunk)
    if has_enough(len(scan.spec.states), choice) and segments > 1 and all(d in _WIDE for d in step.state_dtypes):
        linear = step.linear()
        if linear is not None:
            return SegmentedAffine(scan, core, linear[1], segments)
    return scan.launch


def _is_ended_by_mask(step: Specialization) -> bool:
    """True if steps have no effect where an integer input is 0 or less, and the input is not known to count down."""
    inputs = [i for i, value in enumerate(step.trace.inputs) if value.dtype == torch.int32 and i not in step.counts]
    return any(ends_early(step.trace.forward, [i]) for i in inputs)
