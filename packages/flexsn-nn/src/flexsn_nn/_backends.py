"""Backends that run a scan, and the choice of a backend for a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

from flexsn_hop import why_dynamo_hop_unavailable
from flexsn_nn._checks import check_name
from flexsn_nn.errors import ExportError, StepModeError
from flexsn_runtime import BackendUnavailableError, TargetName, why_unavailable
from flexsn_runtime.backend import BACKENDS as KERNELS

Backend = Literal["auto", "triton", "inductor", "cpp", "hop", "torch"]
StepMode = Literal["s", "m"]

BACKENDS: tuple[Backend, ...] = ("auto", "triton", "inductor", "cpp", "hop", "torch")
STEP_MODES: tuple[StepMode, ...] = ("s", "m")
# Both names denote the same backend.
_TRITON = frozenset({"triton", "inductor"})
KERNEL_BACKENDS = _TRITON | {"cpp"}
# Backends with compiled kernels that `choose` may return.
COMPILED = frozenset({"triton", "cpp"})


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen backend with its reason, and rejected backends with their reasons.

    Attributes:
        refused: the reason for each backend that was considered but not chosen.
    """

    backend: Backend
    reason: str
    refused: dict[str, str]


def check_backend(backend: str, step_mode: str) -> Backend:
    """Returns `backend` if it is known and can run in `step_mode`. Otherwise raises an error.

    Raises:
        UnknownNameError: the name is unknown. The message contains the nearest known name.
        StepModeError: the backend cannot run in this step mode.
    """
    check_name("backend", backend, BACKENDS)
    valid_backend = cast(Backend, backend)
    if not takes_step_mode(valid_backend, step_mode):
        raise StepModeError(
            f"backend={backend!r} compiles the loop over time and needs step_mode='m'; step_mode is "
            f"{step_mode!r}. Use backend='torch' for single steps."
        )
    return valid_backend


def takes_step_mode(backend: Backend, step_mode: str) -> bool:
    """True if `backend` can run in `step_mode`."""
    return backend not in _TRITON or step_mode == "m"


def written_in(backend: Backend) -> TargetName:
    """Returns the language in which a backend's kernels for the CPU are written."""
    return "triton" if backend in _TRITON else "cpp"


def check_step_mode(step_mode: str) -> StepMode:
    """Returns `step_mode` if it is known. Otherwise raises `UnknownNameError`."""
    check_name("step_mode", step_mode, STEP_MODES)
    return cast(StepMode, step_mode)


def choose(backend: Backend, step_mode: StepMode, device: torch.device, compiling: bool) -> Choice:
    """Chooses the backend for tensors on `device`.

    Args:
        compiling: True if the call is inside `torch.compile` or `torch.export`.

    Raises:
        BackendUnavailableError: compiled kernels are requested by name, but cannot run here.
    """
    if backend in ("torch", "hop"):
        return Choice(backend, f"requested by backend={backend!r}", {})
    target: TargetName = "cpp" if backend == "cpp" or (backend == "auto" and device.type == "cpu") else "triton"
    reason = why_unavailable(device, target)
    if backend in KERNEL_BACKENDS:
        if reason is not None:
            raise BackendUnavailableError(f"backend={backend!r} cannot run: {reason}")
        return _choose_with_kernels(target, f"requested by backend={backend!r}", compiling)
    if reason is not None:
        return _choose_without_kernels(f"compiled kernels cannot run: {reason}", step_mode, compiling)
    if step_mode == "s" and compiling:
        return _choose_without_kernels(
            "a compiler fuses a single step with the operations around it", step_mode, compiling
        )
    return _choose_with_kernels(target, f"the tensors are on {device.type!r}, where compiled kernels run", compiling)


def choose_for_onnx(backend: Backend) -> Backend:
    """Chooses the backend inside of `torch.onnx.export`: the unrolled loop.

    ONNX has the operations of the loop, but not FlexSN's operators.

    Raises:
        ExportError: another backend is requested by name.
    """
    if backend in ("auto", "torch"):
        return "torch"
    raise ExportError(
        f"backend={backend!r} has no ONNX function. Export the loop, unrolled for a fixed number of steps, or single "
        "steps (step_mode='s'): functional.set_backend(net, 'torch'), or 'auto', before torch.onnx.export."
    )


def _choose_with_kernels(target: TargetName, reason: str, compiling: bool) -> Choice:
    """Chooses kernels, which run between graphs inside of a compiler. Prefers the operator there if it is available."""
    if not compiling:
        return Choice(target, reason, {})
    no_operator_reason = KERNELS[target].why_not_in_graphs() or why_dynamo_hop_unavailable()
    if no_operator_reason is not None:
        return Choice(target, reason, {"hop": no_operator_reason})
    lowering = "as the operator: Inductor lowers it to kernels or, with a warning, to a loop if kernels refuse the core"
    return Choice("hop", f"{reason}; {lowering}", {})


def _choose_without_kernels(no_kernels_reason: str, step_mode: StepMode, compiling: bool) -> Choice:
    """Chooses the operator if it is available and a compiler would unroll the loop. Otherwise chooses the loop."""
    if step_mode == "s":
        return Choice("torch", no_kernels_reason, {})
    if not compiling:
        return Choice("torch", no_kernels_reason, {"hop": "outside of torch.compile it runs this loop"})
    no_operator_reason = why_dynamo_hop_unavailable()
    if no_operator_reason is not None:
        return Choice("torch", no_kernels_reason, {"hop": no_operator_reason})
    return Choice("hop", no_kernels_reason, {"torch": "torch.compile would unroll the loop, step by step"})
