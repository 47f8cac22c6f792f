"""The kernels of scans in segments, whose launches receive additional scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flexsn_codegen import BackwardSpec, ForwardSpec, KernelSource
from flexsn_codegen.targets._entry import Entry
from flexsn_graph import Port, Role
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch, launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.step._pointwise_step import Specialization

_Spec = TypeVar("_Spec", bound=ForwardSpec | BackwardSpec)

# Number of calls on short sequences that run in segments. Later calls are serial, unless a CUDA graph records them.
_CALLS_IN_SEGMENTS = 8

# Maps dtypes of values to the wider dtypes in which registers hold these values.
_REGISTER_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of a dtype pass from kernel to kernel without rounding."""
    return _REGISTER_DTYPES.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class SerialScan(Generic[_Spec]):
    """A scan that its serial kernel runs in one launch. The kernels of segments can replace the serial kernel.

    Attributes:
        launch: launch of the serial kernel.
        params: parameters of the kernel.
        step: the step that the kernel computes.
        spec: spec of the kernel.
        sizes: integer arguments of all kernels of the scan.
        config: blocks, chunks and warps.
        device: device of the tensors.
        launched: minimum number of steps for which segments pay off if Python launches their kernels; same as in
            `SegmentRule`.
    """

    launch: Launch
    params: Sequence[Port]
    step: Specialization
    spec: _Spec
    sizes: Mapping[str, int]
    config: LaunchConfig
    device: torch.device
    launched: int = 1

    def kernel(self, task: str, key: tuple[Hashable, ...], write: Callable[[], KernelSource]) -> CompiledKernel:
        """Returns a kernel of the scan in segments. Each kernel is generated once.

        Args:
            task: the task of the kernel.
            key: names of the cores in the source that `write` returns, and other values on which the source depends.
        """
        return self.step.segment_kernel((task, self.spec, *key), write)


class SegmentKernel:
    """One kernel of a scan in segments.

    Args:
        scan: scan whose tensors the calls of the kernel receive.
        sizes: additional sizes, which include ``"SEGMENTS"``.
        num_parallel: number of segments that run in parallel.
    """

    def __init__(
        self, kernel: CompiledKernel, scan: SerialScan[_Spec], sizes: Mapping[str, int], num_parallel: int
    ) -> None:
        integers = {**scan.sizes, **sizes, "BESIDE": num_parallel}
        self._launch: Launch = launch(kernel, integers, scan.config, scan.device)
        places = {port: i for i, port in enumerate(scan.params)}
        self._places = [(port, places.get(port)) for port in kernel.params]

    def __call__(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Launches the kernel on the scan's tensors and on `scratch`, which may replace some of these tensors."""
        self._launch(self._list_arguments(tensors, scratch))

    def compile(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Compiles the kernel for tensors like these, without launching it."""
        self._launch.compile(self._list_arguments(tensors, scratch))

    @property
    def is_compiled(self) -> bool:
        return self._launch.is_compiled

    def _list_arguments(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> list[Tensor]:
        arguments = []
        for port, place in self._places:
            tensor = scratch.get(port)
            if tensor is None:
                assert place is not None, port
                tensor = tensors[place]
            arguments.append(tensor)
        return arguments


def allocate_rows(
    role: Role, dtypes: Sequence[torch.dtype], shape: tuple[int, int], device: torch.device
) -> dict[Port, Tensor]:
    """Allocates scratch memory `[segments, elements]` for each port of a role."""
    return {Port(role, i): torch.empty(shape, dtype=dtype, device=device) for i, dtype in enumerate(dtypes)}


class InSegments(Generic[_Spec]):
    """Runs a scan as several kernels instead of its serial kernel.

    Args:
        scan: the scan to run in segments.
    """

    def __init__(self, scan: SerialScan[_Spec]) -> None:
        self.scan = scan
        self._num_first = _CALLS_IN_SEGMENTS if scan.sizes["T"] < scan.launched else 0
        self._is_long = self._num_first == 0

    @property
    def is_compiled(self) -> bool:
        return all(kernel.is_compiled for kernel in self._list_kernels())

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        return self.scan.launch.allocator(shape, strides, dtype=dtype, device=device)

    def entry(self) -> Entry | None:
        """Returns the entry of the serial kernel if calls run it; otherwise `None`."""
        return None if self._is_long or self._num_first else self.scan.launch.entry()

    def compile(self, tensors: Sequence[Tensor]) -> None:
        scratch = self._allocate_scratch(tensors, empty=True)
        for kernel in self._list_kernels():
            kernel.compile(tensors, scratch)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        if not self._pays_off():
            self.scan.launch(tensors)
            return
        scratch = self._allocate_scratch(tensors)
        for kernel in self._list_kernels():
            kernel(tensors, scratch)
        self._finish(tensors, scratch)

    def _pays_off(self) -> bool:
        """True if several launches pay off in this call: the sequence is long, or a CUDA graph records the launches.

        Also True for the first calls, which compile the kernels that a CUDA graph needs, and learn the warm-up.
        """
        if self._is_long:
            return True
        if self._num_first:
            self._num_first -= 1
            return True
        return torch.cuda.is_current_stream_capturing()

    def _list_kernels(self) -> Sequence[SegmentKernel]:
        """Returns the kernels, in the order of their launches."""
        raise NotImplementedError

    def _allocate_scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        """Allocates the memory through which kernels pass values. If `empty` is True, this memory has no elements."""
        raise NotImplementedError

    def _finish(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Completes the results after the last kernel."""

    def _choose_scratch_shape(self, segments: int, *, empty: bool) -> tuple[int, int]:
        """Returns the shape of scratch memory, `[segments, elements]`."""
        return (0, 0) if empty else (segments, self.scan.sizes["NCL"])
