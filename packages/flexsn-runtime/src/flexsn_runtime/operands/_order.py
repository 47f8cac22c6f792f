"""The order of dimensions in memory: which one the results of a scan have, and a kernel's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_runtime._torch_private import size_hint

Operand = tuple[Sequence[int], Sequence[int]]
"""Sizes and strides of a tensor, with as many dimensions as the result; sizes of 1 where it broadcasts."""


def memory_order(shape: Sequence[int], operands: Sequence[Operand], also: Sequence[Operand] = ()) -> tuple[int, ...]:
    """The dimensions of what an elementwise operation returns, the outermost in memory first.

    This is the rule of PyTorch's `TensorIterator`: tensors that are all contiguous, or all channels-last, give a result
    that is, too. Otherwise dimensions are sorted by the strides of the first operand that tells two of them apart. An
    operand says nothing of a dimension in which its stride is 0.

    Args:
        also: operands that are asked where the others say nothing.
    """
    usual = tuple(range(len(shape)))
    if 0 in shape or all(_is_dense(shape, operand, usual) for operand in operands):
        return usual
    if len(shape) in (4, 5):
        channels_last = (0, *usual[2:], 1)
        if all(_is_dense(shape, operand, channels_last) for operand in operands):
            return channels_last
    rows = [
        [0 if size == 1 and whole != 1 else stride for whole, size, stride in zip(shape, *operand, strict=True)]
        for operand in (*operands, *also)
    ]

    def belong_apart(inner: int, outer: int) -> int:
        """1: the two should change places, -1: they should not, 0: nobody says."""
        for strides in rows:
            first, second = strides[inner], strides[outer]
            if first == 0 or second == 0:
                continue
            if first != second:
                return 1 if first > second else -1
            if shape[inner] > shape[outer]:
                return 1
        return 0

    order = list(reversed(usual))  # the innermost first
    for i in range(1, len(order)):
        place = i
        for before in reversed(range(i)):
            verdict = belong_apart(order[before], order[place])
            if verdict < 0:
                break
            if verdict > 0:
                order[before], order[place] = order[place], order[before]
                place = before
    return tuple(reversed(order))


def _is_dense(shape: Sequence[int], operand: Operand, order: Sequence[int]) -> bool:
    """Whether a tensor has all of the shape, and memory without holes in this order."""
    sizes, strides = operand
    unit = 1
    for d in reversed(order):
        if sizes[d] != shape[d] or (strides[d] != unit and shape[d] != 1):
            return False
        unit *= shape[d]
    return True


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of memory without holes, in which dimensions have this order."""
    strides = [1] * len(shape)
    unit = 1
    for d in reversed(order):
        strides[d] = unit
        unit = unit * shape[d]
    return tuple(strides)


def in_order(tensor: Tensor | None, order: Sequence[int] | None) -> Tensor | None:
    """`tensor`, or a copy of it, without holes in memory and with its dimensions in this order; `None`: as it is."""
    if tensor is None or order is None:
        return tensor
    return tensor.permute(tuple(order)).contiguous().permute([order.index(d) for d in range(len(order))])


def order_of(tensor: Tensor, *, guarded: bool = False) -> tuple[int, ...]:
    """The order of the dimensions of a new tensor in the format of this one.

    Args:
        guarded: as for `ScanFormat.of`.
    """
    sizes, strides = _numbers(tensor, guarded)
    return memory_order(sizes, [(sizes, strides)])


def unusual_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of a tensor's dimensions in memory, unless it is the usual one."""
    order = order_of(tensor)
    return None if order == tuple(range(len(order))) else order


def strides_like(tensor: Tensor, *, guarded: bool = False) -> tuple[int, ...]:
    """The strides of a new tensor in the format of this one: its own, unless it has holes or overlaps.

    Args:
        guarded: as for `ScanFormat.of`.
    """
    return dense_strides(tensor.shape, order_of(tensor, guarded=guarded))


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The dimensions of a step, sorted: an input that is channels-last in memory is read one element after the other.

    Attributes:
        dims: dimensions of a step, the outermost in memory first.
    """

    dims: tuple[int, ...]

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Sizes or strides in this order."""
        return tuple(sizes[d] for d in self.dims)

    def layout(self, layout: LiftedLayout) -> LiftedLayout:
        return LiftedLayout(self.shape(layout.strides), layout.offset)


@dataclass(frozen=True, slots=True)
class ScanFormat:
    """How the results of a scan lie in memory, as if they were elementwise in its inputs and initial states.

    Attributes:
        order: of a step's elements, in which kernels count them.
        sequence: strides of `[T, *step]`.
        step: strides of `[*step]`.
    """

    order: StepOrder
    sequence: tuple[int, ...]
    step: tuple[int, ...]

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        inputs: Sequence[Tensor],
        states: Sequence[Tensor | None],
        *,
        guarded: bool = False,
    ) -> ScanFormat:
        """The format that these give. States decide where inputs say nothing: those are the same at every step.

        Args:
            shape: the step's.
            inputs: `[T, *step]` each, or what broadcasts to it behind T. Others do not decide: a step with products
                is not elementwise.
            states: `[*step]` each, or `None`.
            guarded: whether a graph that is traced may hold only where symbolic sizes and strides compare as now.
                Otherwise they are taken for what they were when they were traced.
        """
        sequence = (inputs[0].shape[0], *shape)
        sizes = _known(sequence, 2, guarded)
        aligned = [_aligned(_numbers(x, guarded), sizes) for x in inputs]
        given = [x for x in aligned if x is not None]
        initial = [_numbers(v, guarded) for v in states if v is not None]
        also = [((1, *step), (0, *strides)) for step, strides in initial]
        in_time = memory_order(sizes, given, also)
        in_step = memory_order(sizes[1:], [_within(x) for x in given], [_within(v) for v in also])
        return cls(StepOrder(in_step), dense_strides(sequence, in_time), dense_strides(shape, in_step))


def _aligned(sequence: Operand, whole: Sequence[int]) -> Operand | None:
    """An input sequence with all dimensions of `whole`; `None` if it does not broadcast to that behind T."""
    sizes, strides = sequence
    missing = len(whole) - len(sizes)
    if missing < 0:
        return None
    step = (*(1,) * missing, *sizes[1:])
    if any(size != full and size != 1 for size, full in zip(step, whole[1:], strict=True)):
        return None
    return (sizes[0], *step), (strides[0], *(0,) * missing, *strides[1:])


def _within(operand: Operand) -> Operand:
    """One step of a sequence."""
    sizes, strides = operand
    return sizes[1:], strides[1:]


def _numbers(tensor: Tensor, guarded: bool) -> Operand:
    # What nobody knows is no size of 0 or 1, and says nothing of the order.
    return _known(tensor.shape, 2, guarded), _known(tensor.stride(), 0, guarded)


def _known(sizes: Sequence[int], unknown: int, guarded: bool) -> tuple[int, ...]:
    """Sizes or strides that can be compared: symbols, if there may be guards, or what these were when traced."""
    hints = [size_hint(size) for size in sizes]
    return tuple(
        unknown if hint is None else size if guarded else hint for size, hint in zip(sizes, hints, strict=True)
    )
