"""Converts jagged nested tensors, which hold sequences without padding, to padded tensors and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flexsn_nn.errors import InputLayoutError, InputShapeError


class Packed(NamedTuple):
    """Positions of a jagged tensor's values in a padded tensor.

    Attributes:
        offsets: `[B + 1]`, index of the first value of each sequence, and the end of the last sequence.
        lengths: `[B]`, lengths of the sequences.
        num_steps: number of steps of the longest sequence.
        step: for each value, the index of its step.
        row: for each value, the index of its sequence.
    """

    offsets: Tensor
    lengths: Tensor
    num_steps: int
    step: Tensor
    row: Tensor

    @classmethod
    def of(cls, jagged: Tensor) -> Packed:
        """Finds the positions of a tensor's values: `[B, lengths, *step]`. The call waits for the tensor's device."""
        offsets: Tensor = jagged.offsets()  # type: ignore[attr-defined]
        lengths = offsets.diff()
        rows = torch.arange(len(lengths), device=offsets.device)
        row = torch.repeat_interleave(rows, lengths)
        step = torch.arange(len(row), device=offsets.device) - offsets[row]
        return cls(offsets, lengths, int(lengths.max()) if len(lengths) else 0, step, row)

    def padded(self, jagged: Tensor) -> Tensor:
        """Pads a tensor with zeros after the end of each sequence: `[B, lengths, *step] -> [T, B, *step]`."""
        values = jagged.values()
        zeros = values.new_zeros(self.num_steps, len(self.lengths), *values.shape[1:])
        padded: Tensor = zeros.index_put((self.step, self.row), values)
        return padded

    def jagged(self, padded: Any) -> Any:
        """Removes the padding of a tensor, or of each tensor in a container: `[T, B, *step] -> [B, lengths, *step]`.

        The container is a list or a tuple. Objects of other shapes and types are returned unchanged.
        """
        if isinstance(padded, list | tuple):
            return type(padded)([self.jagged(item) for item in padded])
        padded_shape = self.num_steps, len(self.lengths)
        if not isinstance(padded, Tensor) or padded.dim() < 2 or tuple(padded.shape[:2]) != padded_shape:
            return padded
        return torch.nested.nested_tensor_from_jagged(padded[self.step, self.row], self.offsets)


def unpack(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Packed | None]:
    """Pads the jagged inputs of a network. Returns the inputs, and the positions of their values.

    The positions are `None` if no input is jagged.

    Raises:
        InputLayoutError: an input is a `PackedSequence`, a nested tensor of another layout, or a nested tensor with
            holes; or only some of the inputs are jagged.
        InputShapeError: the sequences of two inputs differ in length.
    """
    packed: Packed | None = None
    padded = []
    for i, value in enumerate(inputs):
        if isinstance(value, PackedSequence):
            raise packed_sequence(f"input {i}")
        if isinstance(value, Tensor) and value.is_nested:
            _check_jagged(f"input {i}", value)
            positions = Packed.of(value)
            if packed is not None and not torch.equal(positions.offsets, packed.offsets):
                raise InputShapeError(f"input {i} has sequences of other lengths than the inputs before it.")
            packed = packed or positions
            value = positions.padded(value)
        padded.append(value)
    if packed is not None and len(padded) != sum(isinstance(v, Tensor) and v.is_nested for v in inputs):
        raise InputLayoutError("some inputs are jagged and others are not: make all of them jagged, or none.")
    return tuple(padded), packed


def packed_sequence(name: str) -> InputLayoutError:
    """Returns the error for a `PackedSequence`, whose number of sequences changes from step to step."""
    return InputLayoutError(
        f"{name} is a PackedSequence, whose number of sequences changes from step to step. Unpack it: x, lengths = "
        "torch.nn.utils.rnn.pad_packed_sequence(x), and functional.run(net, x, lengths=lengths); or give a nested "
        "tensor with layout=torch.jagged."
    )


def _check_jagged(name: str, value: Tensor) -> None:
    if value.layout is not torch.jagged:
        raise InputLayoutError(
            f"{name} is a nested tensor of layout {value.layout}; give one of layout=torch.jagged, [B, lengths, *step]."
        )
    if value.lengths() is not None:  # type: ignore[attr-defined]
        raise InputLayoutError(f"{name} is a nested tensor with holes between its sequences: x.contiguous().")
    if value.dim() < 2 or isinstance(value.shape[1], int):
        raise InputLayoutError(
            f"{name} is a nested tensor whose sequences differ in another dimension than the second; give "
            "[B, lengths, *step]."
        )
