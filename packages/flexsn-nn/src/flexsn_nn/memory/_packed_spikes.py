"""Spikes kept as bits for the backward."""

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
from flexsn_nn.memory._ranges import LAYERS, Unknown, WholeRange, bits_of, mark, range_of
from flexsn_runtime import saving_hooks

# Below, there is nothing to gain.
_FEWEST_BYTES = 256
# Entries of freed memory are removed at this number of entries, then at twice the number of those that remained.
_MOST_KNOWN = 64


class KeptWhole(NamedTuple):
    """Something made of spikes that was kept as it is.

    Attributes:
        shape, dtype: the tensor's.
        reason: why.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}: {self.reason}"


class PackedSpikes:
    """Inside of the `with` block, spikes are kept for the backward as bits: 1/32 of float32, 1/16 of bfloat16.

    For the gradient of its weights, a layer keeps its input: after neurons, spikes. They are packed when autograd keeps
    them, and unpacked when the backward reads them, wherever that runs; results do not change. What is packed is
    derived from the graph, without a look at values: outputs of neurons that have a `spike_range`, and what is made of
    these by views, copies, max pooling, concatenation, additions and products among them. Sums, as in SEW blocks, take
    2, 4 or 8 bits for a number. What fits neither is kept whole, and listed in `kept_whole`.

    Compiled kernels write the bits of zeros and ones themselves, with the spikes, and these are not read again to be
    packed. That holds for layers that read a neuron's output, or all of it in another shape; where a core's output is
    not known to be 0 or 1 from its operations, `explain()` of the neuron says so, and it is packed afterwards.

    Compiled graphs keep what they keep; neurons between them are seen, and those inside are not.

    Args:
        net: a network; the neurons in it are looked at.
        by_kernels: whether kernels may write bits. `False`: all is packed afterwards, to compare.

    Attributes:
        bytes_whole: of what was packed, as it was.
        bytes_packed: what is kept instead.
        bytes_by_kernels: of these, what compiled kernels wrote themselves.
        kept_whole: made of spikes, and not packed.

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
                f"no neuron of {type(net).__name__} is known to give whole numbers: set neuron.spike_range = (0, 1) of "
                "those that do."
            )
        self._hooks: list[Any] = []
        self._saving: Any = None
        # By the memory that was packed: weak references to it and to its bits.
        self._known: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Bits]]] = {}
        self._most_known = _MOST_KNOWN

    def __enter__(self) -> Self:
        if self._saving is not None:
            raise RuntimeError("this PackedSpikes is in use: enter it once, or make another one.")
        # Before other hooks, which may return something else.
        self._hooks = [neuron.register_forward_hook(_mark, prepend=True) for neuron in self._neurons]
        self._ask_for_bits(1)
        hooks = saving_hooks(self._packed, _unpack, _FEWEST_BYTES, LAYERS)
        self._saving = torch.autograd.graph.saved_tensors_hooks(*(hooks or (self._pack, _unpack)))
        self._saving.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saving.__exit__(kind, error, trace)
        self._saving = None
        self._ask_for_bits(-1)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._known.clear()

    def __str__(self) -> str:
        lines = [
            f"spikes of {self.bytes_whole} bytes are kept in {self.bytes_packed}, of which kernels wrote "
            f"{self.bytes_by_kernels}"
        ]
        if self.kept_whole:
            lines += ["kept whole:", *(f"  {one}" for one in dict.fromkeys(self.kept_whole))]
        return "\n".join(lines)

    def _ask_for_bits(self, more: int) -> None:
        """Lets the neurons' kernels write bits, or no more; there may be other contexts around them."""
        for neuron in self._neurons:
            if self._by_kernels and isinstance(neuron, FlexSN):
                neuron._bits.asked += more

    def _pack(self, tensor: Tensor) -> _Whole | _Packed:
        return self._packed(tensor) or _Whole(tensor, None if tensor.is_inference() else tensor._version)

    def _packed(self, tensor: Tensor) -> _Packed | None:
        # Most of what is saved is no node's output: parameters, statistics, what kernels keep.
        is_made = tensor.grad_fn is not None and type(tensor) is Tensor
        if not is_made or tensor.nbytes < _FEWEST_BYTES or not tensor.is_floating_point():
            return None
        found = range_of(tensor)
        if isinstance(found, Unknown):
            if found.reason:
                self._keep_whole(tensor, found.reason)
            return None
        bits = bits_for(*found)
        if bits is None or bits >= 8 * tensor.element_size():
            self._keep_whole(tensor, f"whole numbers from {found.low} to {found.high} take too many bits")
            return None
        if not _is_dense(tensor.shape, tensor.stride()):
            self._keep_whole(tensor, "it has holes in memory, or elements more than once")
            return None
        return _Packed(self._bits(tensor, found, bits), tensor.shape, tensor.stride(), tensor.dtype)

    def _keep_whole(self, tensor: Tensor, reason: str) -> None:
        self.kept_whole.append(KeptWhole(tuple(tensor.shape), tensor.dtype, reason))

    def _bits(self, tensor: Tensor, found: WholeRange, bits: int) -> Bits:
        """The bits of a tensor without holes, once for all layers that read the same memory."""
        memory = tensor.untyped_storage()
        storage, count = StorageWeakRef(memory), tensor.numel()
        key = (storage.cdata, tensor.storage_offset(), count, tensor.element_size(), tensor._version, *found)
        known = self._known.get(key)
        before = None if known is None or known[0].expired() else known[1]()
        if before is not None:
            return before
        written = bits_of(tensor) if found == (0, 1) else None
        if written is not None and tensor.nbytes == memory.nbytes():
            made = Bits(written, found.low, bits, count, count // written.shape[0])
            self.bytes_by_kernels += written.nbytes
        else:
            with torch.no_grad():
                made = Bits.of(tensor.detach().as_strided((count,), (1,)), found.low, bits)
        if len(self._known) >= self._most_known:
            self._known = {k: pair for k, pair in self._known.items() if not pair[0].expired()}
            self._most_known = max(_MOST_KNOWN, 2 * len(self._known))
        self._known[key] = storage, weakref.ref(made)
        self.bytes_whole += tensor.nbytes
        self.bytes_packed += made.packed.nbytes
        return made


@dataclass(frozen=True, slots=True)
class _Packed:
    """Bits that autograd keeps instead of a tensor."""

    bits: Bits
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that autograd keeps as it is.

    Attributes:
        version: the tensor's when it was saved, which autograd does not compare where there are hooks; `None` of an
            inference tensor, which has none.
    """

    tensor: Tensor
    version: int | None


def _unpack(kept: _Whole | _Packed) -> Tensor:
    if isinstance(kept, _Whole):
        if kept.version is not None and kept.tensor._version != kept.version:
            raise RuntimeError(
                f"a tensor of shape {list(kept.tensor.shape)} that the backward needs was changed in place since the "
                f"forward (version {kept.tensor._version} instead of {kept.version}), as by an optimizer's step. Call "
                "backward() before that, or change a copy."
            )
        return kept.tensor
    return kept.bits.numbers(kept.dtype).as_strided(kept.shape, kept.strides)


def _mark(neuron: Any, inputs: Any, output: Any) -> None:
    """A forward hook: the (first) output consists of whole numbers."""
    if torch.compiler.is_compiling():
        return
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    bits = neuron._bits.take(first) if isinstance(neuron, FlexSN) else None
    found = neuron.spike_range if bits is None else (0, 1)  # which are all that kernels write bits of
    if found is not None:
        low, high = found
        mark(first, low, high, bits)


@lru_cache(maxsize=1024)
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """True if elements fill a part of memory, each once."""
    unit = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != unit:
            return False
        unit *= size
    return True
