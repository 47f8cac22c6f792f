"""The ways to run a scan, and the choice between them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from flexsn_nn.errors import StepModeError, UnknownNameError
from flexsn_runtime import BackendUnavailableError, triton_interpreted, why_unavailable

Backend = Literal["auto", "triton", "inductor", "hop", "torch"]
StepMode = Literal["s", "m"]

BACKENDS: tuple[Backend, ...] = ("auto", "triton", "inductor", "hop", "torch")
STEP_MODES: tuple[StepMode, ...] = ("s", "m")
# Two labels, one path.
KERNEL_BACKENDS = frozenset({"triton", "inductor"})


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why."""

    backend: Backend
    reason: str


def check_backend(backend: str, step_mode: str) -> Backend:
    """`backend`, or an error that names it and the nearest known one."""
    known = cast(Backend, _known("backend", backend, BACKENDS))
    if known in KERNEL_BACKENDS and step_mode != "m":
        raise StepModeError(
            f"backend={backend!r} compiles the loop over time and needs step_mode='m'; step_mode is "
            f"{step_mode!r}. Use backend='torch' for single steps."
        )
    return known


def check_step_mode(step_mode: str) -> StepMode:
    """`step_mode`, or an error that names it."""
    return cast(StepMode, _known("step_mode", step_mode, STEP_MODES))


def choose(backend: Backend, step_mode: StepMode, device: torch.device) -> Choice:
    """The backend for tensors on `device`.

    Raises:
        BackendUnavailableError: compiled kernels were asked for by name and cannot run here.
    """
    if backend in ("torch", "hop"):
        return Choice(backend, f"asked for as backend={backend!r}")
    if backend == "auto" and step_mode == "s":
        return Choice("torch", "single steps have no loop to compile")
    why = why_unavailable(device)
    if backend in KERNEL_BACKENDS:
        if why is not None:
            raise BackendUnavailableError(f"backend={backend!r} cannot run: {why}")
        return Choice("triton", f"asked for as backend={backend!r}")
    if why is not None:
        return Choice("torch", f"compiled kernels cannot run: {why}")
    if triton_interpreted():
        return Choice("torch", "Triton's interpreter is on, which is for tests and slower than the loop")
    return Choice("triton", f"the tensors are on {device.type!r}, where compiled kernels run")


def _known(what: str, name: str, names: Sequence[str]) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"unknown {what} {name!r}; known: {', '.join(map(repr, names))}.{hint}")
