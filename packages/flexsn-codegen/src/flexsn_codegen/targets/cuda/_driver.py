"""Loads and launches compiled kernels with CUDA's driver."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

from flexsn_codegen.errors import CompilationError

_CLUSTER_DIMENSION = 4  # a value of CUlaunchAttributeID
# Values of CUfunction_attribute.
_REGISTERS, _LOCAL_BYTES, _MOST_SHARED, _ANY_CLUSTER = 4, 3, 8, 14
_USUAL_SHARED = 46 << 10  # in bytes: 48 KiB, without memory for a kernel's own variables
_USUAL_CLUSTER = 8


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, failure: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CompilationError(f"CUDA's driver {failure}: {(text.value or b'unknown error').decode()}.")


def _enter(device: torch.device) -> None:
    """Makes PyTorch's context current in a thread that has no context yet, such as a new thread of autograd."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "has no context")
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0), "has no context")
        _check(driver.cuCtxSetCurrent(context), "has no context")


class _Attribute(ctypes.Structure):
    """The struct `CUlaunchAttribute`, with a value of up to 16 numbers."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Configuration(ctypes.Structure):
    """The struct `CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaFunction:
    """A kernel that is loaded on one GPU.

    Args:
        cubin: a cubin that contains the kernel.
        name: the kernel's name.
        device: the GPU.
        cluster: number of blocks in a cluster.
        threads: number of threads in a block.
        shared: bytes of shared memory for a block, in addition to the kernel's own variables.

    Attributes:
        address: address of the kernel for the driver.
        threads: number of threads in a block.
        shared: bytes of shared memory for a block, in addition to the kernel's own variables.
        registers: number of registers that each thread uses.
        spilled: bytes of local memory that each thread uses.
        at_once: number of clusters that the GPU can run at the same time. `None` if the driver does not report
            this number.

    Raises:
        CompilationError: the driver cannot load the kernel, or the GPU has too few resources for a block.
    """

    def __init__(
        self, cubin: bytes, name: str, device: torch.device, *, cluster: int, threads: int, shared: int
    ) -> None:
        self._device, self.threads, self.shared = device, threads, shared
        driver = _driver()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _enter(device)
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "cannot load a kernel")
            _check(
                driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
                f"does not find the kernel {name}",
            )
            if cluster > _USUAL_CLUSTER:
                self._set(_ANY_CLUSTER, 1)
            if shared > _USUAL_SHARED:
                self._set(_MOST_SHARED, shared)
            self.at_once = self._count_clusters_at_once(cluster)
        self.address = self._function.value or 0
        self.registers, self.spilled = self._get(_REGISTERS), self._get(_LOCAL_BYTES)

    def _count_clusters_at_once(self, cluster: int) -> int | None:
        attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        triple = ctypes.c_uint * 3
        configuration = _Configuration(
            triple(cluster, 1, 1), triple(self.threads, 1, 1), self.shared, None, ctypes.pointer(attribute), 1
        )
        count = ctypes.c_int()
        code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(configuration))
        return None if code else count.value

    def _set(self, attribute: int, value: int) -> None:
        _check(_driver().cuFuncSetAttribute(self._function, attribute, value), "has too few resources for a kernel")

    def _get(self, attribute: int) -> int:
        value = ctypes.c_int()
        _check(
            _driver().cuFuncGetAttribute(ctypes.byref(value), attribute, self._function),
            "does not report a property of a kernel",
        )
        return value.value

    def __call__(self, blocks: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
        """Launches the kernel on PyTorch's current stream.

        Args:
            blocks: number of blocks.
            pointers: addresses of the kernel's tensors.
            numbers: the kernel's integer arguments, 64 bits each.
        """
        values = (*pointers, *numbers)
        memory = ctypes.create_string_buffer(struct.pack(f"{len(values)}q", *values))
        start = ctypes.addressof(memory)
        arguments = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            _enter(self._device)
            code = _driver().cuLaunchKernel(
                self._function, blocks, 1, 1, self.threads, 1, 1, self.shared, stream, arguments, None
            )
        _check(code, "cannot launch a kernel")
