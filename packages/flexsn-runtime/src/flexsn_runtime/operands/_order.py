"""The order of dimensions in memory, for the results of a scan and for the elements of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_hop.formats import Operand, broadcast_sequences, broadcast_states, dense_strides, memory_order
from flexsn_runtime._torch_private import size_hint


def in_order(tensor: Tensor | None, order: Sequence[int] | None) -> Tensor | None:
    """Returns `tensor`, or a copy without holes, whose dimensions have this memory order.

    If `order` is `None`, returns `tensor` unchanged.
    """
    if tensor is None or order is None:
        return tensor
    return tensor.permute(tuple(order)).contiguous().permute([order.index(d) for d in range(len(order))])


def order_of(tensor: Tensor, *, guarded: bool = False) -> tuple[int, ...]:
    """Returns the dimension order of a new tensor in the format of `tensor`.

    Args:
        guarded: see `ScanFormat.of`.
    """
    sizes, strides = _read_layout(tensor, guarded)
    return memory_order(sizes, [(sizes, strides)])


def unusual_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the order of a tensor's dimensions in memory; `None` for the order of a contiguous tensor."""
    order = order_of(tensor)
    return None if order == tuple(range(len(order))) else order


def strides_like(tensor: Tensor, *, guarded: bool = False) -> tuple[int, ...]:
    """Returns strides for a new tensor in the format of `tensor`. The new tensor has neither holes nor overlaps.

    Args:
        guarded: see `ScanFormat.of`.
    """
    return dense_strides(tensor.shape, order_of(tensor, guarded=guarded))


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The dimensions of a step, sorted so that the memory of a channels-last input is read in order.

    Attributes:
        dims: dimensions of a step, beginning with the outermost in memory.
    """

    dims: tuple[int, ...]

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns sizes or strides in this order."""
        return tuple(sizes[d] for d in self.dims)

    def layout(self, layout: LiftedLayout) -> LiftedLayout:
        return LiftedLayout(self.shape(layout.strides), layout.offset)


@dataclass(frozen=True, slots=True)
class ScanFormat:
    """The memory format of a scan's results: the format that an elementwise function of inputs and states would have.

    Attributes:
        order: order in which kernels count a step's elements.
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
        """Returns the format for these inputs and states. If inputs do not determine it, states do.

        Args:
            shape: the step's shape.
            inputs: sequences of shape `[T, *step]`, or with dimensions after T that broadcast to the step. Inputs of
                other shapes do not affect the format, because a step with products is not elementwise.
            states: `[*step]` each, or `None`.
            guarded: True if the graph that is being traced may depend on comparisons of symbolic sizes and strides. If
                False, the comparisons use the values that the symbols have during tracing.
        """
        sequence = (inputs[0].shape[0], *shape)
        sizes = _resolve(sequence, 2, guarded)
        input_operands = broadcast_sequences(sizes, [_read_layout(x, guarded) for x in inputs])
        state_operands = broadcast_states(sizes, [_read_layout(v, guarded) for v in states if v is not None])
        in_time = memory_order(sizes, input_operands, state_operands)
        in_step = memory_order(
            sizes[1:], [_select_step(x) for x in input_operands], [_select_step(v) for v in state_operands]
        )
        return cls(StepOrder(in_step), dense_strides(sequence, in_time), dense_strides(shape, in_step))


def _select_step(operand: Operand) -> Operand:
    """Returns sizes and strides of one step of a sequence."""
    sizes, strides = operand
    return sizes[1:], strides[1:]


def _read_layout(tensor: Tensor, guarded: bool) -> Operand:
    # 2 stands for an unknown size, since it is neither 0 nor 1. 0 stands for an unknown stride, and has no effect.
    return _resolve(tensor.shape, 2, guarded), _resolve(tensor.stride(), 0, guarded)


def _resolve(sizes: Sequence[int], unknown: int, guarded: bool) -> tuple[int, ...]:
    """Returns comparable sizes or strides: symbols if `guarded` is True, otherwise the symbols' values during tracing.

    Args:
        unknown: replacement for a size or stride whose value is unknown.
    """
    hints = [size_hint(size) for size in sizes]
    return tuple(
        unknown if hint is None else size if guarded else hint for size, hint in zip(sizes, hints, strict=True)
    )
