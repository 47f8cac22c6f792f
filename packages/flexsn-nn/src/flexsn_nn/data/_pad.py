"""Batches of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from flexsn_nn.errors import ParameterError

__all__ = ["pad_sequences"]


def pad_sequences(batch: Sequence[tuple[Any, Any]], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Any]:
    """Combines sequences into a batch. Pads them with zeros at their ends. Serves as `collate_fn` of a `DataLoader`.

    Args:
        batch: samples `(sequence, target)`. A sequence is a tensor or an array `[T_i, *step]` with at least one step,
            for example frames from `tonic.transforms.ToFrame`. All steps have the same shape and dtype.
        dtype: dtype of the sequences in the batch. If `dtype` is `None`, whole numbers and booleans are converted to
            `torch.get_default_dtype()`, which neurons and weights accept, and other numbers keep their dtype.

    Returns:
        `(sequences, lengths, targets)`. The sequences are `[T, B, *step]`, where `T` is the greatest length. The
        lengths are `[B]`, int64. The targets are joined by `torch.utils.data.default_collate`; class numbers become
        `[B]`.

    Raises:
        ParameterError: the batch is empty, a sequence has no steps, or the steps differ in shape or dtype.

    Example:
        >>> x, lengths, targets = pad_sequences([(torch.ones(3, 2), 5), (torch.ones(1, 2), 7)])
        >>> x[:, :, 0].T.tolist(), lengths.tolist(), targets.tolist()
        ([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], [3, 1], [5, 7])
    """
    if not batch:
        raise ParameterError("got no samples; a batch needs at least one.")
    sequences = [torch.as_tensor(sequence) for sequence, _ in batch]
    for number, sequence in enumerate(sequences):
        if sequence.dim() == 0 or len(sequence) == 0:
            raise ParameterError(
                f"sequence {number} of the batch has the shape {list(sequence.shape)}; expected [T, *step] with T >= 1."
            )
        if sequence.shape[1:] != sequences[0].shape[1:] or sequence.dtype != sequences[0].dtype:
            raise ParameterError(
                f"sequence {number} of the batch has steps of shape {list(sequence.shape[1:])} and {sequence.dtype}, "
                f"sequence 0 has {list(sequences[0].shape[1:])} and {sequences[0].dtype}; only the number of steps may "
                "differ."
            )
    first = sequences[0]
    if dtype is None:
        dtype = first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = torch.zeros(int(lengths.max()), len(sequences), *first.shape[1:], dtype=dtype, device=first.device)
    for number, sequence in enumerate(sequences):
        padded[: len(sequence), number] = sequence
    return padded, lengths, default_collate([target for _, target in batch])
