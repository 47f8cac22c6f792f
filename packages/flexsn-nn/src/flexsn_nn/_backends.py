"""The ways to run a scan, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

from flexsn_hop import register_scan_lowering, why_dynamo_hop_unavailable
from flexsn_nn._checks import check_name
from flexsn_nn.errors import StepModeError
from flexsn_runtime import BackendUnavailableError, KernelLowering, triton_interpreted, why_unavailable

Backend = Literal["auto", "triton", "inductor", "hop", "torch"]
StepMode = Literal["s", "m"]

BACKENDS: tuple[Backend, ...] = ("auto", "triton", "inductor", "hop", "torch")
STEP_MODES: tuple[StepMode, ...] = ("s", "m")
# Two labels, one path.
KERNEL_BACKENDS = frozenset({"triton", "inductor"})

# The operator becomes launches of kernels in what torch.compile makes of a network.
register_scan_lowering(KernelLowering())


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why; and what does not, and why not.

    Attributes:
        refused: by backend, for those that were considered.
    """

    backend: Backend
    reason: str
    refused: dict[str, str]


def check_backend(backend: str, step_mode: str) -> Backend:
    """`backend`, or an error that names it and the nearest known one."""
    check_name("backend", backend, BACKENDS)
    known = cast(Backend, backend)
    if known in KERNEL_BACKENDS and step_mode != "m":
        raise StepModeError(
            f"backend={backend!r} compiles the loop over time and needs step_mode='m'; step_mode is "
            f"{step_mode!r}. Use backend='torch' for single steps."
        )
    return known


def check_step_mode(step_mode: str) -> StepMode:
    """`step_mode`, or an error that names it."""
    check_name("step_mode", step_mode, STEP_MODES)
    return cast(StepMode, step_mode)


def choose(backend: Backend, step_mode: StepMode, device: torch.device, compiling: bool) -> Choice:
    """The backend for tensors on `device`.

    Args:
        compiling: whether the call is inside `torch.compile` or `torch.export`.

    Raises:
        BackendUnavailableError: compiled kernels were asked for by name and cannot run here.
    """
    if backend in ("torch", "hop"):
        return Choice(backend, f"asked for as backend={backend!r}", {})
    if backend == "auto" and step_mode == "s":
        return Choice("torch", "single steps have no loop to compile", {})
    why = why_unavailable(device)
    if backend in KERNEL_BACKENDS:
        if why is not None:
            raise BackendUnavailableError(f"backend={backend!r} cannot run: {why}")
        return _with_kernels(f"asked for as backend={backend!r}", compiling)
    if why is None and not triton_interpreted():
        return _with_kernels(f"the tensors are on {device.type!r}, where compiled kernels run", compiling)
    return _without_kernels(
        f"compiled kernels cannot run: {why}"
        if why is not None
        else "Triton's interpreter is on, which is for tests and slower than the loop",
        compiling,
    )


def _with_kernels(reason: str, compiling: bool) -> Choice:
    """Kernels: in the graph where a compiler can have them there, else between its graphs."""
    if not compiling:
        return Choice("triton", reason, {})
    why_no_operator = (
        "Triton's interpreter is on, and a compiler cannot call it"
        if triton_interpreted()
        else why_dynamo_hop_unavailable()
    )
    if why_no_operator is not None:
        return Choice("triton", reason, {"hop": why_no_operator})
    return Choice("hop", f"{reason}; as the operator, whose kernels are part of the compiled graph", {})


def _without_kernels(why_no_kernels: str, compiling: bool) -> Choice:
    """The operator where a compiler would unroll the loop; elsewhere the operator runs the loop itself."""
    if not compiling:
        return Choice("torch", why_no_kernels, {"hop": "outside of torch.compile it runs this loop"})
    why_no_operator = why_dynamo_hop_unavailable()
    if why_no_operator is not None:
        return Choice("torch", why_no_kernels, {"hop": why_no_operator})
    return Choice("hop", why_no_kernels, {"torch": "torch.compile would unroll the loop, step by step"})
