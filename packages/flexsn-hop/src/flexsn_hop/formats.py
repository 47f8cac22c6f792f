"""Memory formats of results.

A result has the format that an elementwise function of the input sequences and initial states returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "Operand",
    "Order",
    "broadcast_sequences",
    "broadcast_states",
    "contiguous_strides",
    "copy_in_order",
    "dense_strides",
    "memory_order",
    "order_like",
    "sequence_order",
    "split_steps",
    "stack_in_order",
    "state_order",
]

Operand = tuple[Sequence[Any], Sequence[Any]]
"""The sizes and strides of a tensor, for each dimension of the result. Where the tensor broadcasts, the size is 1."""

Order = tuple[int, ...]
"""The dimensions of a tensor in the order of memory, from the outermost to the innermost dimension."""


def memory_order(shape: Sequence[Any], operands: Sequence[Operand], also: Sequence[Operand] = ()) -> Order:
    """Returns the order of dimensions of an elementwise operation's result.

    The rule is the rule of PyTorch's ``TensorIterator``: if all tensors are contiguous, the result is contiguous, and
    if all tensors are channels-last, the result is channels-last. Otherwise, the dimensions are sorted: two dimensions
    are compared by their strides in the first operand in which these strides are different and not 0. If two strides
    are equal, the larger dimension is placed outside. If no operand decides, the operands in ``also`` decide.
    """
    default_order = tuple(range(len(shape)))
    if any(type(size) is int and size == 0 for size in shape):
        return default_order
    if all(_is_dense(shape, operand, default_order) for operand in operands):
        return default_order if operands else _sort_dimensions(shape, also)
    if len(shape) in (4, 5):
        channels_last = (0, *default_order[2:], 1)
        if all(_is_dense(shape, operand, channels_last) for operand in operands):
            return channels_last
    return _sort_dimensions(shape, [*operands, *also])


def _sort_dimensions(shape: Sequence[Any], operands: Sequence[Operand]) -> Order:
    rows = [
        [_find_stride(*d) for d in zip(shape, sizes, strides, strict=True)]  # d: (size of the result, size, stride)
        for sizes, strides in operands
    ]
    order = list(range(len(shape)))[::-1]  # starts with the innermost dimension
    for i in range(1, len(order)):
        position = i
        for before in range(i - 1, -1, -1):
            decision = _compare(shape, rows, order[before], order[position])
            if decision < 0:
                break
            if decision > 0:
                order[before], order[position] = order[position], order[before]
                position = before
    return tuple(order[::-1])


def _find_stride(whole: Any, size: Any, stride: Any) -> Any:
    """Returns the stride of an operand along one dimension; 0 if the operand broadcasts along the dimension."""
    if type(stride) is int and stride == 0:
        return 0
    # The order of the comparisons matters: a size that equals `whole` must not be compared with 1, because the result
    # of this comparison may depend on data.
    return 0 if size != whole and size == 1 else stride


def _compare(shape: Sequence[Any], rows: Sequence[Sequence[Any]], inner: int, outer: int) -> int:
    """Returns 1 if the two dimensions must be swapped, -1 if they are in order, and 0 if no stride decides."""
    for strides in rows:
        first, second = strides[inner], strides[outer]
        if first == 0 or second == 0:
            continue
        if first != second:
            return 1 if first > second else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _is_dense(shape: Sequence[Any], operand: Operand, order: Order) -> bool:
    """True if a tensor does not broadcast, and is dense in memory with its dimensions in this order."""
    sizes, strides = operand
    unit = 1
    for d in order[::-1]:
        if sizes[d] != shape[d] or (strides[d] != unit and shape[d] != 1):
            return False
        unit = unit * shape[d]
    return True


def dense_strides(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Returns the strides of a tensor that is dense in memory, with its dimensions in this order."""
    strides: list[Any] = [1] * len(shape)
    unit = 1
    for d in order[::-1]:
        strides[d] = unit
        unit = unit * shape[d]
    return tuple(strides)


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the strides of a contiguous tensor."""
    return dense_strides(shape, range(len(shape)))


def order_like(tensor: torch.Tensor) -> Order:
    """Returns the order of dimensions of a new tensor with the format of ``tensor``."""
    if tensor.layout is not torch.strided:
        return tuple(range(tensor.dim()))
    return memory_order(tensor.shape, [(tensor.shape, tensor.stride())])


def sequence_order(shape: Sequence[Any], inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> Order:
    """Returns the order of a result ``[T, *shape]``: the order of the inputs, or of the states if no input decides.

    Inputs and states that do not broadcast to the result are ignored. A core that is not elementwise may have such
    inputs and states.
    """
    whole = (inputs[0].shape[0], *shape)
    return memory_order(
        whole, broadcast_sequences(whole, _list_strided(inputs)), broadcast_states(whole, _list_strided(states))
    )


def state_order(shape: Sequence[Any], inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> Order:
    """Returns the order of a state ``[*shape]``, by the rule of `sequence_order`."""
    steps = [(sizes[1:], strides[1:]) for sizes, strides in _list_strided(inputs)]
    return memory_order(shape, _align_all(shape, steps), _align_all(shape, _list_strided(states)))


def broadcast_sequences(whole: Sequence[Any], sequences: Sequence[Operand]) -> list[Operand]:
    """Extends sequences to all dimensions of ``whole``. Omits sequences that do not broadcast to ``whole``."""
    steps = [(sizes[1:], strides[1:]) for sizes, strides in sequences]
    pairs = zip(sequences, (_align(whole[1:], *step) for step in steps), strict=True)
    return [((sizes[0], *step[0]), (strides[0], *step[1])) for (sizes, strides), step in pairs if step is not None]


def broadcast_states(whole: Sequence[Any], states: Sequence[Operand]) -> list[Operand]:
    """Extends the states to all dimensions of ``whole``. Omits states that do not broadcast to ``whole[1:]``."""
    return [((1, *sizes), (0, *strides)) for sizes, strides in _align_all(whole[1:], states)]


def _list_strided(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors if tensor.layout is torch.strided]


def _align_all(whole: Sequence[Any], operands: Sequence[Operand]) -> list[Operand]:
    aligned = (_align(whole, *operand) for operand in operands)
    return [operand for operand in aligned if operand is not None]


def _align(whole: Sequence[Any], shape: Sequence[Any], strides: Sequence[Any]) -> Operand | None:
    """Extends a tensor to all dimensions of ``whole``. Returns None if the tensor does not broadcast to ``whole``."""
    missing = len(whole) - len(shape)
    if missing < 0:
        return None
    sizes = (*[1] * missing, *shape)
    # The order of the comparisons matters: a size that equals `full` must not be compared with 1, because the result of
    # this comparison may depend on data.
    if any(size != full and size != 1 for size, full in zip(sizes, whole, strict=True)):
        return None
    return sizes, (*[0] * missing, *strides)


_MOST_WITH_NAMES = 5
"""The number of dimensions of ``torch.channels_last_3d``. ``torch.channels_last`` has one dimension fewer."""


def _count_guarded_dims(dims: int) -> int:
    """Returns the number of extra dimensions with which `torch.stack` of steps returns a contiguous sequence.

    Without extra dimensions, `torch.stack` may return a channels-last sequence.
    """
    return _MOST_WITH_NAMES + 1 - dims if dims in (_MOST_WITH_NAMES - 1, _MOST_WITH_NAMES) else 0


def split_steps(sequence: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns ``sequence.unbind(0)``, such that the gradient of the sequence has the format of the sequence."""
    if sequence.layout is not torch.strided:
        return [sequence.select(0, step) for step in range(sequence.shape[0])]  # sparse tensors have no unbind
    order = order_like(sequence)
    dims = len(order)
    spare = _count_guarded_dims(dims) if sequence.requires_grad else 0
    if spare == 0 and order == tuple(range(dims)):
        return sequence.unbind(0)
    in_memory = sequence.permute(order)[(None,) * spare]
    inverse = _invert([d - 1 for d in order if d > 0])
    steps = in_memory.unbind(spare + order.index(0))
    if spare:
        steps = tuple(step.flatten(0, spare) for step in steps)
    return steps if inverse == list(range(dims - 1)) else tuple(step.permute(inverse) for step in steps)


def stack_in_order(steps: Sequence[torch.Tensor], order: Order) -> torch.Tensor:
    """Returns ``torch.stack(steps)``, dense in memory with its dimensions in this order."""
    dims = len(order)
    is_default_order = order == tuple(range(dims))
    if steps[0].layout is not torch.strided:
        return torch.stack(list(steps))
    if is_default_order and all(step.is_contiguous() for step in steps):
        return torch.stack(list(steps))
    within = [d - 1 for d in order if d > 0]
    spare = _count_guarded_dims(dims)
    values = [step.permute(within)[(None,) * spare] for step in steps]
    stacked = torch.stack(values, spare + order.index(0))
    if spare:
        stacked = stacked.flatten(0, spare)
    return stacked.permute(_invert(order))


def copy_in_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns a copy that is dense in memory with its dimensions in this order."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    in_memory = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return in_memory.permute(_invert(order))


def _invert(order: Sequence[int]) -> list[int]:
    positions = [0] * len(order)
    for position, d in enumerate(order):
        positions[d] = position
    return positions
