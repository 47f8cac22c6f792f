"""`PackedSpikes`: a context that stores spikes for the backward as bits."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flexsn_nn._checks import check_module
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.memory._bits import Bits, bits_for
from flexsn_nn.memory._ranges import LAYERS, VIEWS, Unknown, WholeRange, bits_of, mark, range_of
from flexsn_runtime import native_unpacking, saving_hooks

# Minimum size of a tensor in bytes for which packing pays off.
_FEWEST_BYTES = 256
# When there are this many entries, the entries of freed memory are removed for the first time. Later, such entries are
# removed each time the number of entries has doubled since the last removal.
_FIRST_MAX_ENTRIES = 64


class KeptWhole(NamedTuple):
    """A tensor that was computed from spikes but not packed.

    Attributes:
        shape, dtype: shape and dtype of the tensor.
        reason: reason why the tensor was not packed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}: {self.reason}"


class PackedSpikes:
    """A context that stores spikes for the backward as bits, in 1/32 of the memory of float32.

    To compute the gradient of its weights, a layer stores its input. After a neuron, this input consists of spikes. In
    a `with` block of this context, the spikes are packed when autograd saves them. They are unpacked when the backward
    reads them, inside or outside of the block. Results do not change. The tensors to pack are determined from their
    autograd graph, without reading values: outputs of neurons with a `spike_range`, and results of views, copies, max
    pooling, concatenation, additions and products of such tensors. Elements of sums, as in SEW blocks, take 2, 4 or 8
    bits. Tensors whose elements need more bits are stored unchanged, and listed in `kept_whole`.

    Compiled kernels write the bits of zeros and ones together with the spikes, so that the spikes are not read again.
    These bits are stored for layers that read a neuron's output, or the whole output in another shape. If the
    operations of a core do not show that its output is 0 or 1, the output is packed afterwards, and the neuron's
    `explain()` reports the reason.

    Compiled graphs are not changed. Spikes of neurons between such graphs are packed, but spikes of neurons inside of a
    graph are not.

    Args:
        net: network whose neurons' spikes are packed.
        by_kernels: True to let kernels write bits. False to pack all spikes afterwards, for comparison.

    Attributes:
        bytes_whole: size of the packed tensors before packing.
        bytes_packed: size of the packed tensors after packing.
        bytes_by_kernels: part of `bytes_packed` that compiled kernels wrote.
        kept_whole: tensors that were computed from spikes but not packed.

    Raises:
        ParameterError: no neuron of `net` has a `spike_range`.

    Example:
        >>> from flexsn_nn import LIF
        >>> net = nn.Sequential(nn.Linear(8, 64), LIF(), nn.Linear(64, 5))
        >>> with PackedSpikes(net) as packing:
        ...     loss = net(torch.rand(4, 2, 8)).sum()
        >>> loss.backward()
        >>> packing.bytes_whole, packing.bytes_packed
        (2048, 64)
    """

    def __init__(self, net: nn.Module, *, by_kernels: bool = True) -> None:
        check_module("net", net)
        self._by_kernels = by_kernels
        self.bytes_whole = 0
        self.bytes_packed = 0
        self.bytes_by_kernels = 0
        self.kept_whole: list[KeptWhole] = []
        self._neurons = [module for module in net.modules() if getattr(module, "spike_range", None) is not None]
        if not self._neurons:
            raise ParameterError(
                f"no neuron of {type(net).__name__} is known to return whole numbers: set neuron.spike_range = (0, 1) "
                "on neurons that return spikes."
            )
        self._hooks: list[Any] = []
        self._saving: Any = None
        self._native: Any = None  # hooks of the compiled launcher, which replace spikes by stored bits without Python
        # Maps the key of packed memory to weak references: to this memory, and to its bits.
        self._bits_by_memory: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Bits]]] = {}
        self._max_entries = _FIRST_MAX_ENTRIES

    def __enter__(self) -> Self:
        if self._saving is not None:
            raise RuntimeError("this PackedSpikes is already active: enter it once, or create another one.")
        native = self._native = saving_hooks(self._pack_spikes, _unpack, self._count, _FEWEST_BYTES, VIEWS, LAYERS)
        # The hook runs before other hooks, which may return another output. The hook holds no reference to this
        # context. Otherwise, a captured step of the network would reach the context's counts, which change in each
        # call.
        hook = _MarkingHook(native)
        self._hooks = [neuron.register_forward_hook(hook, prepend=True) for neuron in self._neurons]
        self._add_users(1)
        hooks = (self._pack, _unpack) if native is None else (native.pack, native.unpack)
        self._saving = torch.autograd.graph.saved_tensors_hooks(*hooks)
        self._saving.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saving.__exit__(kind, error, trace)
        self._saving = None
        self._add_users(-1)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._bits_by_memory.clear()
        if self._native is not None:
            self._native.clear()

    def __str__(self) -> str:
        lines = [
            f"spikes of {self.bytes_whole} bytes are stored in {self.bytes_packed} bytes, of which kernels wrote "
            f"{self.bytes_by_kernels}"
        ]
        if self.kept_whole:
            lines += ["kept whole:", *(f"  {tensor}" for tensor in dict.fromkeys(self.kept_whole))]
        return "\n".join(lines)

    def _add_users(self, more: int) -> None:
        """Adds `more` to the number of contexts for which the neurons' kernels write bits.

        Args:
            more: 1 at the beginning of this context, -1 at its end.
        """
        for neuron in self._neurons:
            if self._by_kernels and isinstance(neuron, FlexSN):
                neuron._bits.num_users += more

    def _pack(self, tensor: Tensor) -> _Whole | _Packed:
        return self._pack_spikes(tensor) or _Whole(tensor, None if tensor.is_inference() else tensor._version)

    def _pack_spikes(self, tensor: Tensor) -> _Packed | None:
        # Most saved tensors are not the output of a node, for example parameters, statistics, and residuals of kernels.
        is_made = tensor.grad_fn is not None and type(tensor) is Tensor
        if not is_made or tensor.nbytes < _FEWEST_BYTES or not tensor.is_floating_point():
            return None
        value_range = range_of(tensor)
        if isinstance(value_range, Unknown):
            if value_range.reason:
                self._record_unpacked(tensor, value_range.reason)
            return None
        bits = bits_for(*value_range)
        if bits is None or bits >= 8 * tensor.element_size():
            self._record_unpacked(
                tensor, f"whole numbers from {value_range.low} to {value_range.high} take too many bits"
            )
            return None
        if not _is_dense(tensor.shape, tensor.stride()):
            self._record_unpacked(tensor, "it has gaps in memory, or repeated elements")
            return None
        return _Packed(self._pack_once(tensor, value_range, bits), tensor.shape, tensor.stride(), tensor.dtype)

    def _record_unpacked(self, tensor: Tensor, reason: str) -> None:
        self.kept_whole.append(KeptWhole(tuple(tensor.shape), tensor.dtype, reason))

    def _pack_once(self, tensor: Tensor, value_range: WholeRange, bits: int) -> Bits:
        """Packs a tensor without gaps once for all layers that read its memory, and returns the bits."""
        memory = tensor.untyped_storage()
        storage, count = StorageWeakRef(memory), tensor.numel()
        key = (storage.cdata, tensor.storage_offset(), count, tensor.element_size(), tensor._version, *value_range)
        stored = self._bits_by_memory.get(key)
        stored_bits = None if stored is None or stored[0].expired() else stored[1]()
        if stored_bits is not None:
            return stored_bits
        packed = bits_of(tensor) if value_range == (0, 1) else None
        is_written = packed is not None and tensor.nbytes == memory.nbytes()
        if packed is None or not is_written:
            with torch.no_grad():
                packed = Bits.of(tensor.detach().as_strided((count,), (1,)), value_range.low, bits)
        if len(self._bits_by_memory) >= self._max_entries:
            self._bits_by_memory = {k: pair for k, pair in self._bits_by_memory.items() if not pair[0].expired()}
            self._max_entries = max(_FIRST_MAX_ENTRIES, 2 * len(self._bits_by_memory))
        self._bits_by_memory[key] = storage, weakref.ref(packed)
        self._count(tensor.nbytes, packed, is_written)
        return packed

    def _count(self, num_bytes: int, bits: Bits, by_kernel: bool) -> None:
        """Counts the bytes of packed memory."""
        self.bytes_whole += num_bytes
        self.bytes_packed += bits.packed.nbytes
        self.bytes_by_kernels += bits.packed.nbytes if by_kernel else 0


@dataclass(frozen=True, slots=True)
class _Packed:
    """Bits that autograd stores instead of a tensor."""

    bits: Bits
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that autograd stores unchanged.

    Attributes:
        version: version of the tensor when it was saved. Autograd does not compare the versions of tensors that it
            saves with hooks. `None` for an inference tensor, which has no version.
    """

    tensor: Tensor
    version: int | None


class _MarkingHook:
    """Forward hook that records that a neuron's first output consists of whole numbers.

    A copied or unpickled hook does not use the compiled launcher.
    """

    __slots__ = ("_native",)

    def __init__(self, native: Any = None) -> None:
        self._native = native

    def __reduce__(self) -> tuple[type[_MarkingHook], tuple[()]]:
        return _MarkingHook, ()

    def __call__(self, neuron: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        written = neuron._bits.take(first) if isinstance(neuron, FlexSN) else None
        if written is None:
            if neuron.spike_range is not None:
                mark(first, *neuron.spike_range)
            return
        count = first.numel()
        bits = Bits(written, 0, 1, count, count // written.shape[0])  # kernels write bits of no other range
        mark(first, 0, 1, bits)
        if self._native is not None:
            self._native.note(first, bits, native_unpacking(1, 0, first.dtype))


def _unpack(saved: _Whole | _Packed) -> Tensor:
    if isinstance(saved, _Whole):
        if saved.version is not None and saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {list(saved.tensor.shape)} that the backward needs was changed in place since the "
                f"forward (version {saved.tensor._version} instead of {saved.version}), for example by an optimizer's "
                "step. Call backward() before this change, or change a copy."
            )
        return saved.tensor
    return saved.bits.numbers(saved.dtype).as_strided(saved.shape, saved.strides)


@lru_cache(maxsize=1024)
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """True if the elements fill a part of memory without gaps or repetitions."""
    unit = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != unit:
            return False
        unit *= size
    return True
