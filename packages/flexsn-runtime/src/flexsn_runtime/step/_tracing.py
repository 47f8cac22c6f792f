"""Traces a step function for the shapes and dtypes of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_graph import CutTrace, RecurrentTrace, StepTrace, StepValue, trace_core, trace_step
from flexsn_runtime._torch_private import as_outside

Core = Callable[..., Any]


def trace_values(
    core: Core,
    counts: tuple[int, int, int],
    values: Sequence[StepValue],
    device: torch.device,
    *,
    products: bool = False,
    on_pieces: bool = False,
) -> StepTrace | RecurrentTrace | CutTrace:
    """Returns the traced step for values like these.

    Args:
        counts: numbers of inputs, states and outputs.
        values: descriptions of the inputs, then of the states.
        products: True if the step may combine different elements, for example by products with captured matrices.
        on_pieces: same as for `trace_step`.
    """
    # One element is enough for any size, since the tracer uses only shape, dtype and device.
    examples = [torch.empty((), dtype=v.dtype, device=device).expand(v.shape) for v in values]
    with as_outside():
        if products:
            return trace_core(core, *counts, examples)
        return trace_step(core, *counts, examples, on_pieces=on_pieces)
