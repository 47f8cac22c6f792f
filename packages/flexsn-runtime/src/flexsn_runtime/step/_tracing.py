"""Traces a step function for the shapes and dtypes of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_graph import RecurrentTrace, StepTrace, StepValue, trace_core, trace_step
from flexsn_runtime._torch_private import as_outside

Core = Callable[..., Any]


def trace_values(
    core: Core,
    counts: tuple[int, int, int],
    values: Sequence[StepValue],
    device: torch.device,
    *,
    products: bool = False,
) -> StepTrace | RecurrentTrace:
    """The step for values like these.

    Args:
        counts: of inputs, states and outputs.
        values: of the inputs, then of the states.
        products: whether the step may multiply its values by captured matrices.
    """
    # One element each, whatever the size: the tracer looks at shape, dtype and device alone.
    examples = [torch.empty((), dtype=v.dtype, device=device).expand(v.shape) for v in values]
    with as_outside():
        return (trace_core if products else trace_step)(core, *counts, examples)
