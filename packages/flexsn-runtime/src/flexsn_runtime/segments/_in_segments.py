"""The launch of a forward scan in segments, of the kind that its step allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexsn_codegen import CoreSource, ForwardSpec
from flexsn_graph import Port
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.segments._affine import SegmentedAffine
from flexsn_runtime.segments._choice import Choice, has_enough, speculation
from flexsn_runtime.segments._forward import SegmentedForward
from flexsn_runtime.step._pointwise_step import Specialization

_WIDE = (torch.float32, torch.float64)


def in_segments(
    serial: Launch,
    params: Sequence[Port],
    step: Specialization,
    spec: ForwardSpec,
    core: CoreSource,
    sizes: Mapping[str, int],
    config: LaunchConfig,
    device: torch.device,
    choice: Choice,
) -> Launch:
    """What runs a forward scan in the place of the launch of its serial kernel; that launch, if nothing else does.

    Exact steps speculate. With fast math, kernels around the same step compute other bits, so there is nothing to
    compare; sums may be in any order then, and affine steps combine.
    """
    if not step.numerics.fast_math:
        return SegmentedForward(serial, params, step, spec, core, sizes, config, device, speculation(step, choice))
    segments = min(choice.number, sizes["T"] // config.chunk)
    if has_enough(len(spec.states), choice) and segments > 1 and all(dtype in _WIDE for dtype in step.state_dtypes):
        found = step.linear()
        if found is not None:
            linear = found[1]
            return SegmentedAffine(serial, params, step, spec, core, linear, sizes, config, device, segments)
    return serial
