"""Launches a kernel whose programs may wait for each other: either all of them run at the same time, or none runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry
from flexsn_codegen.targets.triton import entry, interpreting, launcher, on_device, prepare_compiler
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._recent import Recent
from flexsn_runtime._triton_private import resources
from flexsn_runtime.errors import GaveUpError
from flexsn_runtime.launches._kernel import CompiledKernel

# Bytes of shared memory that the GPU reserves for each program, in addition to the bytes that the program requests.
_RESERVED = 1024
_WARP = 32
# The number of registers of a warp is rounded up to a multiple of this number.
_REGISTER_UNIT = 256


class CooperativeKernel:
    """A kernel whose programs may wait for each other.

    Args:
        rows: number of rows that one program computes.
        num_warps: number of warps of one program.
        together: True if the kernel's programs wait for each other.
    """

    def __init__(
        self, kernel: CompiledKernel, rows: int, num_warps: int, device: torch.device, *, together: bool
    ) -> None:
        self._function = kernel.function
        self._rows, self._num_warps, self._device = rows, num_warps, device
        self._options = {**kernel.options, "num_warps": num_warps}
        if together:
            self._options["launch_cooperative_grid"] = True
        self._launches: Recent[CooperativeLaunch] = Recent()

    def launch(self, tensors: Sequence[Tensor], numbers: tuple[int, ...]) -> CooperativeLaunch:
        """Returns the launch for these integer arguments, on tensors with the alignments of `tensors`.

        Compiles the kernel if necessary.
        """
        # Triton compiles a separate binary for each combination of alignments.
        key = (*[t.data_ptr() % 16 == 0 for t in tensors], *numbers)
        launch = self._launches.get(key)
        if launch is None:
            room = self._count_resident(tensors, numbers)
            launch = CooperativeLaunch(self._function, (*numbers, self._rows), room, self._options, self._device)
            self._launches[key] = launch
        return launch

    def _count_resident(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> int:
        """Returns the number of programs that the device can run at the same time; 0 if the kernel should not run."""
        if triton_interpreted():
            return 1
        prepare_compiler()
        device = torch.cuda.get_device_properties(self._device)
        with on_device(self._device):
            compiled = self._function.warmup(*tensors, *numbers, BLOCK=self._rows, grid=(1, 1, 1), **self._options)
            usage = resources(compiled, device.shared_memory_per_block_optin)  # loads the kernel on the device
        if usage is None:
            return 0
        registers, shared = usage
        registers_per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        limits = (
            device.regs_per_multiprocessor // max(1, registers_per_warp * self._num_warps),
            device.shared_memory_per_multiprocessor // (shared + _RESERVED),
            device.max_threads_per_multi_processor // (_WARP * self._num_warps),
        )
        return min(limits) * int(device.multi_processor_count)


class CooperativeLaunch:
    """Runs a kernel on tensors of one alignment, any number of times.

    Args:
        function: a `triton.jit` function.
        numbers: arguments of the function after the tensors.
        room: number of programs that the device can run at the same time.
        options: compilation options of the function.
    """

    def __init__(
        self, function: Any, numbers: tuple[int, ...], room: int, options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.room = room
        self._function, self._numbers, self._options, self._device = function, numbers, options, device
        self._relaunches: dict[int, Callable[[Sequence[Tensor]], None]] = {}
        self._entries: dict[int, Entry] = {}

    def entry(self, programs: int) -> Entry | None:
        """Returns the data for launches by address with this number of programs.

        Returns `None` before the first launch with this number, or if Triton does not provide the data.
        """
        return self._entries.get(programs)

    def __call__(self, tensors: Sequence[Tensor], programs: int) -> None:
        """Launches `programs` programs. If programs wait for each other, their number must be at most `room`."""
        if triton_interpreted():
            with interpreting():
                self._function[(programs, 1, 1)](*tensors, *self._numbers)
            return
        relaunch = self._relaunches.get(programs)
        if relaunch is not None:
            relaunch(tensors)
            return
        grid = (programs, 1, 1)
        with on_device(self._device):
            compiled = self._function[grid](*tensors, *self._numbers, **self._options)
        if compiled is not None:
            self._relaunches[programs] = launcher(compiled, grid, self._numbers, self._device)
            launch_data = entry(compiled, grid, self._numbers)
            if launch_data is not None:
                self._entries[programs] = launch_data


class Marks:
    """Marks in the host's memory, one number for each device. Kernels whose programs gave up waiting set the mark.

    A kernel writes directly to this memory, so the host reads the mark without waiting for the kernel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the mark that kernels on this device set."""
        mark = self._marks.get(device)
        if mark is None:
            with self._lock:
                pinned = device.type == "cuda"
                zero = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)
                mark = self._marks.setdefault(device, zero)
        return mark

    def check(self, device: torch.device) -> None:
        """Raises an error if a kernel has given up since the last check.

        Raises:
            GaveUpError: the results of an earlier launch are NaN.
        """
        mark = self.on(device)
        if mark.item():
            mark.zero_()
            raise GaveUpError(
                "programs of an earlier recurrent kernel on this GPU gave up waiting for each other. The kernel's "
                "results, and everything computed from them, are NaN. Its programs did not all run at the same "
                "time, for example because other processes use the GPU, or because of a debugger. Run again, or set "
                "FLEXSN_ONE_LAUNCH=0, which launches kernels step by step."
            )


MARKS = Marks()
