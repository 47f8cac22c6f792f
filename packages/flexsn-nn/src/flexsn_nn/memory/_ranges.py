"""Ranges of whole numbers in tensors, derived from the operations that compute these tensors from spikes."""

from __future__ import annotations

import math
import struct
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from flexsn_nn.memory._bits import Bits

_KEY = "flexsn_nn.spikes"
_RANGE_KEY = "flexsn_nn.range"
_MOST_NODES = 64


class WholeRange(NamedTuple):
    """Whole numbers from `low` to `high`."""

    low: int
    high: int


class Unknown(NamedTuple):
    """Values of unknown range.

    Attributes:
        reason: cause to report, such as an operation on spikes without a rule; empty if there is none, as for results
            of layers.
    """

    reason: str = ""


_UNKNOWN = Unknown()


class _Mark(NamedTuple):
    """Record about the output of a graph node.

    Attributes:
        range: range of the output's values.
        version: version of the output when this record was made.
        output: weak reference to the output.
        bits: bits of the output's memory; `None` if no kernel wrote bits.
    """

    range: WholeRange
    version: int
    output: weakref.ref[Tensor]
    bits: Bits | None


def mark(spikes: Tensor, low: int, high: int, bits: Bits | None = None) -> None:
    """Records that a tensor that requires grad consists of whole numbers from `low` to `high`.

    Args:
        spikes: first output of a neuron.
        bits: bits of the tensor's dense memory, as kernels write them. With `None`, bits that were recorded earlier for
            the same version are kept.
    """
    node: Any = spikes.grad_fn
    if node is None:
        return
    marks = node.metadata.setdefault(_KEY, {})
    before: _Mark | None = marks.get(spikes.output_nr)
    if bits is None and before is not None and before.version == spikes._version:
        bits = before.bits
    marks[spikes.output_nr] = _Mark(WholeRange(low, high), spikes._version, weakref.ref(spikes), bits)


def bits_of(tensor: Tensor) -> Bits | None:
    """Returns the bits that a kernel wrote for the memory of a tensor; `None` if no kernel wrote bits.

    Args:
        tensor: tensor whose `range_of` is known, and which is a view of the whole memory.
    """
    node: Any = tensor.grad_fn
    output = tensor.output_nr
    while node is not None:
        marks = node.metadata.get(_KEY)
        if marks is not None:
            return marks[output].bits if output in marks and tensor.storage_offset() == 0 else None
        if _derive_kind(node.name()) not in VIEWS:
            return None
        node, output = node.next_functions[0]
    return None


def range_of(tensor: Tensor) -> WholeRange | Unknown:
    """Derives the range of a tensor's whole numbers from its autograd graph, with a few dictionary lookups.

    In-place changes that are part of the graph are taken into account. Changes under `torch.no_grad` are detected in
    outputs of neurons, and in views of these outputs.
    """
    node: Any = tensor.grad_fn
    if node is None:
        return _UNKNOWN
    return _find_range(node, tensor.output_nr, tensor._version, [_MOST_NODES])


class Scaled(NamedTuple):
    """Whole numbers from `low` to `high`, multiplied by `scale` and rounded."""

    range: WholeRange
    scale: float


def scaled_range_of(tensor: Tensor) -> Scaled | Unknown:
    """Derives a range like `range_of`, and also supports one scaling.

    The scaling is dropout, average pooling over 2, 4, 8, … elements, a product with a positive number, or a division by
    a power of two.
    """
    node: Any = tensor.grad_fn
    number, version = tensor.output_nr, tensor._version
    while node is not None and _derive_kind(node.name()) in VIEWS and _KEY not in node.metadata:
        node, number = node.next_functions[0]
    if node is None:
        return _UNKNOWN
    unscaled = _find_range(node, number, version, [_MOST_NODES])
    if isinstance(unscaled, WholeRange):
        return Scaled(unscaled, 1.0)
    scale, times = _find_scale(node, tensor.device.type)
    source, number = node.next_functions[0] if node.next_functions else (None, 0)
    if scale is None or source is None:
        return unscaled
    inner = _find_range(source, number, None, [_MOST_NODES])
    if isinstance(inner, Unknown):
        return unscaled
    return Scaled(WholeRange(min(inner.low, 0) * times, max(inner.high, 0) * times), scale)


def _find_scale(node: Any, device: str) -> tuple[float | None, int]:
    """Returns the float32 scale by which an operation multiplies a sum, and the number of summands.

    The scale is `None` if the operation is not a scaling that is supported. The number of summands is 1 except for
    pooling.
    """
    kind = _derive_kind(node.name())
    if kind == "NativeDropout" and 0 <= node._saved_p < 1:
        remaining = 1.0 - node._saved_p
        # The kernel on a GPU computes the scale in float32.
        return (
            _round_to_float32(1.0 / _round_to_float32(remaining))
            if device == "cuda"
            else _round_to_float32(1.0 / remaining)
        ), 1
    if kind in ("Mul", "Div"):
        other = node._saved_other
        if not isinstance(other, Tensor) or other.dim() != 0 or other.device.type != "cpu" or other.requires_grad:
            return None, 1
        number = float(other)
        if kind == "Div":
            number = 1.0 / number if number in _POWERS else 0.0
        number = _round_to_float32(number)
        return (number if 2.0**-60 < number < 2.0**60 else None), 1
    if kind in ("AvgPool2D", "AvgPool3D") and node._saved_divisor_override is None and not node._saved_ceil_mode:
        size = math.prod(node._saved_kernel_size)
        is_plain = node._saved_count_include_pad or not any(node._saved_padding)
        return (1.0 / size, size) if is_plain and size in _POWERS else (None, 1)
    return None, 1


_POWERS = frozenset(2.0**i for i in range(16))


def _round_to_float32(number: float) -> float:
    """Returns the nearest float32; 0 if the number is too large for float32."""
    try:
        nearest: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return 0.0
    return nearest


# Names of operations whose result is a view of their input.
VIEWS = frozenset(
    {
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Alias",
        "Transpose",
        "T",
        "Permute",
        "Slice",
        "Select",
        "Unbind",
        "Split",
        "SplitWithSizes",
        "Expand",
        "Squeeze",
        "Unsqueeze",
        "Unfold",
        "Diagonal",
        "AsStrided",
    }
)
_SINGLE = VIEWS | {
    "Index",
    "IndexSelect",
    "Gather",
    "Take",
    "Repeat",
    "Flip",
    "Roll",
    "Clone",
    "ToCopy",
    "MaxPool",
    "MaxPool2D",
    "MaxPool2DWithIndices",
    "MaxPool3DWithIndices",
    "AdaptiveMaxPool2D",
    "AdaptiveMaxPool3D",
    "FractionalMaxPool2D",
    "FractionalMaxPool3D",
    "UpsampleNearest1D",
    "UpsampleNearest2D",
    "UpsampleNearest3D",
    "UpsampleNearestExact1D",
    "UpsampleNearestExact2D",
    "UpsampleNearestExact3D",
    "PixelShuffle",
    "PixelUnshuffle",
    "ChannelShuffle",
    "Relu",
}
# Operations whose results contain the values of one tensor, and no other values.
_PASSING = _SINGLE - {"Relu"}
# Operations on several tensors.
_SEVERAL = frozenset({"Cat", "Stack", "Maximum", "Minimum", "Add", "Sub", "Mul"})
_FOLLOWED = _SINGLE | _SEVERAL
# Operations of layers with weights. Their results are not spikes, so these results have an unknown range without a
# reason.
LAYERS = frozenset({"Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "NativeBatchNorm", "CudnnBatchNorm"})


def _find_range(node: Any, output: int, version: int | None, budget: list[int]) -> WholeRange | Unknown:
    """Finds the range of one output of a node.

    Args:
        version: version of the tensor whose range is derived, if it shares the memory of the output; `None` if it is a
            copy.
        budget: list with one element, the number of nodes that may still be visited.
    """
    while True:
        kind = _derive_kind(node.name())
        if kind in LAYERS:
            return _UNKNOWN
        metadata = node.metadata
        marks = metadata.get(_KEY)
        if marks is not None:
            return _read_mark(marks[output], version) if output in marks else _UNKNOWN
        budget[0] -= 1
        if budget[0] < 0:
            return Unknown("more operations than are followed")
        if kind not in _FOLLOWED:
            return _find_reason(kind, node, budget) if kind[:1].isupper() else _UNKNOWN
        sources = node.next_functions
        if len(sources) != 1 or kind not in _PASSING:
            break
        version = version if kind in VIEWS else None
        node, output = sources[0]
        if node is None:
            return _UNKNOWN
    if kind in _SEVERAL:  # stored, because nested sums are looked up repeatedly
        stored: WholeRange | Unknown | None = metadata.get(_RANGE_KEY)
        if stored is not None:
            return stored
    inputs = [
        _UNKNOWN if source is None else _find_range(source, number, version if kind in VIEWS else None, budget)
        for source, number in sources
    ]
    unknown = next((bounds for bounds in inputs if isinstance(bounds, Unknown)), None)
    if unknown is not None or not inputs:
        has_range = any(isinstance(bounds, WholeRange) for bounds in inputs)
        reason = unknown.reason if unknown is not None else ""
        return Unknown(reason or (f"{kind} with values of unknown range" if has_range else ""))
    result = _combine(kind, node, [bounds for bounds in inputs if isinstance(bounds, WholeRange)])
    if kind in _SEVERAL:
        metadata[_RANGE_KEY] = result
    return result


def _find_reason(kind: str, node: Any, budget: list[int]) -> Unknown:
    """Returns `Unknown` for an operation without a rule. Its name is the reason if all of its inputs have ranges."""
    ranges = [_find_range(source, number, None, budget) for source, number in node.next_functions if source is not None]
    return Unknown(kind if ranges and all(isinstance(bounds, WholeRange) for bounds in ranges) else "")


@lru_cache(maxsize=1024)
def _derive_kind(name: str) -> str:
    """Derives the name of an operation from the name of its node."""
    return name.rstrip("0123456789").removesuffix("Backward")


def _read_mark(mark: _Mark, version: int | None) -> WholeRange | Unknown:
    output = mark.output()
    changed = version not in (None, mark.version) or (output is not None and output._version != mark.version)
    return Unknown("a change in place") if changed else mark.range


def _combine(kind: str, node: Any, inputs: list[WholeRange]) -> WholeRange | Unknown:
    if kind == "Relu":
        return WholeRange(max(inputs[0].low, 0), max(inputs[0].high, 0))
    if kind in ("Add", "Sub"):
        if node._saved_alpha != 1:
            return Unknown(f"{kind} with alpha")
        a, b = inputs
        return (
            WholeRange(a.low + b.low, a.high + b.high) if kind == "Add" else WholeRange(a.low - b.high, a.high - b.low)
        )
    if kind == "Mul":
        a, b = inputs
        products = [x * y for x in a for y in b]
        return WholeRange(min(products), max(products))
    return WholeRange(min(bounds.low for bounds in inputs), max(bounds.high for bounds in inputs))
