"""The order of dimensions in memory: which one the results of a scan have, and a kernel's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_hop.formats import Operand, broadcast_sequences, broadcast_states, dense_strides, memory_order
from flexsn_runtime._torch_private import size_hint


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
        given = broadcast_sequences(sizes, [_numbers(x, guarded) for x in inputs])
        also = broadcast_states(sizes, [_numbers(v, guarded) for v in states if v is not None])
        in_time = memory_order(sizes, given, also)
        in_step = memory_order(sizes[1:], [_within(x) for x in given], [_within(v) for v in also])
        return cls(StepOrder(in_step), dense_strides(sequence, in_time), dense_strides(shape, in_step))


def _within(operand: Operand) -> Operand:
    """One step of a sequence."""
    sizes, strides = operand
    return sizes[1:], strides[1:]


def _numbers(tensor: Tensor, guarded: bool) -> Operand:
    # An unknown size counts as neither 0 nor 1, and an unknown stride decides nothing about the order.
    return _known(tensor.shape, 2, guarded), _known(tensor.stride(), 0, guarded)


def _known(sizes: Sequence[int], unknown: int, guarded: bool) -> tuple[int, ...]:
    """Sizes or strides that can be compared: symbols, if there may be guards, or what these were when traced."""
    hints = [size_hint(size) for size in sizes]
    return tuple(
        unknown if hint is None else size if guarded else hint for size, hint in zip(sizes, hints, strict=True)
    )
