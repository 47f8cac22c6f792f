"""Chooses between residuals, which the forward stores for the backward, and recomputation in the backward."""

from __future__ import annotations

import math
from typing import Literal, get_args

from flexsn_graph import Port, Residuals, Role, StepGraph, StepTrace, keep_residuals
from flexsn_runtime.errors import ResidualsError

Policy = Literal["auto", "recompute", "save"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def check_policy(policy: str) -> Policy:
    """Returns `policy` if it is known; otherwise, raises an error that names the known policies."""
    for known_policy in POLICIES:
        if policy == known_policy:
            return known_policy
    raise ResidualsError(f"residuals={policy!r}; it must be one of {', '.join(map(repr, POLICIES))}.")


def choose_residuals(
    trace: StepTrace, vjp: StepGraph, policy: Policy, *, rounded: bool, chunk: int
) -> Residuals | None:
    """Returns the residuals to save; `None` if the backward recomputes the states from checkpoints and inputs.

    Args:
        vjp: the VJP of the step, with all cotangents.
        policy: `"save"` or `"auto"`.
        rounded: True if values in half precision are rounded after each op.
        chunk: number of steps between two checkpoints.
    """
    residuals = keep_residuals(trace, vjp, rounded=rounded)
    return (
        residuals
        if policy == "save" or _count_saved_bytes(residuals) < _count_recomputed_bytes(trace, vjp, chunk)
        else None
    )


# A residual of one byte counts as this number of bytes, since kernels take as long to move one byte as to move four. In
# benchmarks/results/residuals.md, bool residuals take longer than recomputation at every size.
_NARROWEST = 4


def _count_saved_bytes(residuals: Residuals) -> float:
    """Returns the bytes per element and step that kernels move for residuals. One byte counts as `_NARROWEST`."""
    num_narrow = sum(dtype.itemsize == 1 for dtype in residuals.dtypes)
    return residuals.traffic + 2 * (_NARROWEST - 1) * num_narrow


def _count_recomputed_bytes(trace: StepTrace, vjp: StepGraph, chunk: int) -> float:
    """Returns the bytes per element and step that recomputation reads and writes: inputs and checkpoints."""
    used_ports = vjp.used
    from_states = any(port.role is Role.STATE for port in used_ports)
    if from_states:
        used_ports |= trace.forward.used
    size = math.prod(trace.step_shape)
    inputs = sum(
        value.dtype.itemsize * math.prod(value.shape) / max(size, 1)
        for i, value in enumerate(trace.inputs)
        if Port(Role.INPUT, i) in used_ports
    )
    checkpoints = sum(value.dtype.itemsize for value in trace.states) / chunk
    return inputs + checkpoints * (2 if from_states else 1)
