"""Launches of pointwise kernels: in Triton on a GPU, in C++ or in Triton's interpreter on the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, DeviceError
from flexsn_codegen.source._numerics import compile_options
from flexsn_codegen.targets import Target
from flexsn_codegen.targets._entry import Entry, unwatched, watching
from flexsn_codegen.targets.cpp import CPP, CppKernel, Program, why_no_compiler
from flexsn_codegen.targets.triton import TRITON, entry, interpreting, launcher

BLOCK = 1024
# The interpreter's run time is proportional to the number of programs, because numpy computes within a program.
_MAX_INTERPRETED_BLOCK = 1 << 16
# The number of elements over which a C++ program loops. With this number, the values stay in the L1 cache.
CPP_BLOCK = 4096


def interpreted() -> bool:
    """True if Triton runs on CPU tensors, in its interpreter."""
    try:
        from flexsn_codegen.targets.triton import device
    except ImportError:
        # Without Triton, an error is raised when the kernel is compiled.
        return os.environ.get("TRITON_INTERPRET", "0") != "0"
    return device.INTERPRETED


def target_on(device: torch.device, name: str) -> Target:
    """The target of kernels on a device.

    Args:
        name: name of the function, for the message of the error.

    Raises:
        DeviceError: no target compiles for the device. The message names the package to install, or the tensors to
            move.
    """
    if device.type == "cuda":
        return TRITON
    if device.type == "cpu":
        if interpreted():
            return TRITON
        reason = why_no_compiler()
        if reason is None:
            return CPP
        raise DeviceError(
            f"the arguments of {name} are on the CPU, where its kernel is compiled from C++, but {reason} Or move them "
            "to a GPU, or set TRITON_INTERPRET=1 before triton is imported, to run slowly without a compiler."
        )
    raise DeviceError(
        f"the arguments of {name} are on {device}: kernels are compiled for CUDA and ROCm GPUs and for the CPU. Move "
        "them to one of these devices."
    )


def target_of(device: torch.device) -> Target:
    """The target of kernels on fake tensors, whose device may be unavailable."""
    return CPP if device.type == "cpu" and not interpreted() else TRITON


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of tensors in memory.

    Raises:
        ArgumentError: a tensor has elements but no memory, so a kernel would crash.
    """
    addresses = [t.data_ptr() for t in tensors]
    if 0 in addresses:
        for tensor, address in zip(tensors, addresses, strict=True):
            if address == 0 and tensor.numel() > 0 and not tensor.is_meta:
                raise ArgumentError(
                    "a tensor that a kernel reads or writes has no memory: it was freed, like a sharded parameter "
                    "between the calls that need it, or consists of zeros for which torch allocates none. Gather it, "
                    "or pass its clone()."
                )
    return addresses


class Launcher:
    """Launches of one kernel over `numel` elements, on tensors with the dtypes and the device of `like`.

    The common part of these launches is prepared once. In C++, it is the compiled function. On a GPU, it is the binary
    that Triton compiles for the numbers and alignments of a call.

    Args:
        kernel: result of `Target.compile`.
        like: tensors like those of each call, in the order of the kernel's parameters.
        numel: the number of elements.
        block: the number of elements of a program in Triton.
        warps: the number of warps of a program on a GPU.
        fixed: True if the kernel is only valid for programs of `block` elements, so that Triton's interpreter must not
            use larger programs.
    """

    def __init__(
        self,
        kernel: Any,
        like: Sequence[Tensor],
        numel: int,
        *,
        fast_math: bool,
        block: int = BLOCK,
        warps: int = 4,
        fixed: bool = False,
    ) -> None:
        self._kernel, self._numel, self._fast_math = kernel, numel, fast_math
        self._block, self._warps, self._fixed = block, warps, fixed
        self._device = like[0].device
        _check_float8(like)
        self._program: Program | None = None
        if isinstance(kernel, CppKernel):
            self._program = kernel.compiled(tuple(t.dtype for t in like), CPP_BLOCK, fast_math=fast_math)
        # The keys are numbers and alignments, because the binary that Triton compiles may depend on them.
        self._binaries: dict[tuple[int, ...], tuple[Callable[[Sequence[Tensor]], None], Any]] = {}

    def serves(self, device: torch.device) -> bool:
        """True if this object launches kernels on the device."""
        return device == self._device

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Launches the kernel.

        Args:
            numbers: the kernel's integer arguments. The first one is the number of elements, or of rows in a kernel on
                rows and columns.

        Raises:
            ArgumentError: see `addresses_of`.
        """
        addresses = addresses_of(tensors)
        if self._program is not None:
            self._program([*addresses, *numbers, torch.get_num_threads()])
        elif interpreted():
            block = min(1 << (self._numel - 1).bit_length(), _MAX_INTERPRETED_BLOCK)
            if self._block > BLOCK:
                block = max(block, self._block)
            if self._fixed:
                block = self._block
            with interpreting():
                self._kernel[(-(-self._numel // block),)](*tensors, *numbers, BLOCK=block)
        else:
            self._launch_on_gpu(tensors, numbers, (*numbers, *[address % 16 for address in addresses]))
        if watching.by is not None:
            watching.by(self, (tensors, numbers), self._make_entry(addresses, numbers))

    def _make_entry(self, addresses: Sequence[int], numbers: Sequence[int]) -> Entry | None:
        """The data for a direct launch with these numbers, on tensors at these addresses."""
        if self._program is not None:
            return Entry(self._program.address, tuple(numbers), 1, 1, 0, self._program, unwatched)
        binary = self._binaries.get((*numbers, *[address % 16 for address in addresses]))
        return None if binary is None else entry(binary[1], self._grid, (*numbers, self._block))

    @property
    def _grid(self) -> tuple[int, int, int]:
        return -(-self._numel // self._block), 1, 1

    def _launch_on_gpu(self, tensors: Sequence[Tensor], numbers: Sequence[int], kind: tuple[int, ...]) -> None:
        repeat = self._binaries.get(kind)
        if repeat is not None and _single_device():
            repeat[0](tensors)
            return
        with torch.cuda.device(self._device):
            if repeat is not None:
                repeat[0](tensors)
                return
            options = compile_options("hip" if torch.version.hip else "cuda", fast_math=self._fast_math)
            compiled = self._kernel[self._grid[:1]](
                *tensors, *numbers, BLOCK=self._block, num_warps=self._warps, **options
            )
        if len(self._binaries) >= _MAX_BINARIES:
            self._binaries.clear()
        self._binaries[kind] = launcher(compiled, self._grid, (*numbers, self._block), self._device), compiled


def _check_float8(tensors: Sequence[Tensor]) -> None:
    """Raises `DeviceError` if a tensor has a float8 dtype that Triton does not support on this GPU."""
    device = tensors[0].device
    if device.type != "cuda" or torch.version.hip or all(t.dtype != torch.float8_e4m3fn for t in tensors):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise DeviceError(
            "kernels read and write torch.float8_e4m3fn on GPUs of compute capability 8.9 and newer, but this GPU has "
            f"{'.'.join(map(str, capability))}: convert to torch.bfloat16 before the call, and to float8 after it."
        )


# The largest number of binaries that a launcher stores. The numbers of a repeated call may differ every time.
_MAX_BINARIES = 16


@functools.cache
def _single_device() -> bool:
    return torch.cuda.device_count() == 1
