"""Steps of a padded batch that count: those within each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_count, check_name, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = ["length_mask", "mask_padding", "readout"]

REDUCTIONS = ("mean", "sum", "max", "last")


def length_mask(lengths: Tensor, num_steps: int) -> Tensor:
    """Returns True at the steps of a sequence, and False at its padding.

    Args:
        lengths: whole numbers `[B]` from 1 to `num_steps`.
        num_steps: `T`.

    Returns:
        Booleans `[T, B]`, on the device of `lengths`.

    Raises:
        ParameterError: `lengths` have another shape or dtype; on the CPU, also if a length is out of range. On a GPU,
            nothing is checked, because reading the numbers would wait for it. Leave the lengths on the CPU.

    Example:
        >>> length_mask(torch.tensor([3, 1]), 3).T.tolist()
        [[True, True, True], [True, False, False]]
    """
    check_count("num_steps", num_steps)
    check_tensor("lengths", lengths)
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise ParameterError(
            f"lengths have the shape {list(lengths.shape)} and {lengths.dtype}; wanted [B], whole numbers."
        )
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and len(lengths):
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 1 or high > num_steps:
            raise ParameterError(f"lengths are from {low} to {high}; wanted from 1 to {num_steps} (steps).")
    return torch.arange(num_steps, device=lengths.device).unsqueeze(1) < lengths


def mask_padding(sequence: Tensor, lengths: Tensor, value: float = 0.0) -> Tensor:
    """Returns the sequences with `value` at all padding steps, to which no gradient flows.

    Losses and metrics that count or sum spikes, such as `loss.ce_count_loss` and `metrics.accuracy`, are then right for
    sequences of different lengths. Those that divide by the number of steps are wrong; use `readout` in their place.

    Args:
        sequence: result of a network, `[T, B, *step]`.
        lengths: whole numbers `[B]` from 1 to `T`, on the CPU or on the sequence's device.
        value: value for the padding.

    Returns:
        A tensor `[T, B, *step]`, of the sequence's dtype.

    Raises:
        ParameterError: the shapes are others; otherwise as in `length_mask`.

    Example:
        >>> mask_padding(torch.ones(3, 2), torch.tensor([3, 1])).T.tolist()
        [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    check_tensor("sequence", sequence)
    return sequence.masked_fill(~_mask(sequence, lengths), value)


def readout(sequence: Tensor, lengths: Tensor, reduction: str = "mean") -> Tensor:
    """Returns one value per neuron, over the steps of each sequence; padding does not count, and gets no gradient.

    From membranes or spikes `[T, B, C]`, it makes the scores `[B, C]` for `torch.nn.functional.cross_entropy`.

    Args:
        sequence: result of a network, `[T, B, *step]`.
        lengths: whole numbers `[B]` from 1 to `T`, on the CPU or on the sequence's device.
        reduction: `"mean"`, over the steps of the sequence; `"sum"`; `"max"`; or `"last"`, the value at the last of its
            steps.

    Returns:
        A tensor `[B, *step]`, of the sequence's dtype; sums of half precision are computed in float32.

    Raises:
        ParameterError: the shapes are others; the sequence has whole numbers; otherwise as in `length_mask`.
        UnknownNameError: the reduction is unknown.

    Example:
        >>> spikes = torch.tensor([[1.0, 1.0], [0.0, 1.0]])  # two steps, of two sequences
        >>> readout(spikes, torch.tensor([2, 1])).tolist()
        [0.5, 1.0]
    """
    check_name("reduction", reduction, REDUCTIONS)
    check_tensor("sequence", sequence)
    if not sequence.is_floating_point():
        raise ParameterError(f"the sequence is {sequence.dtype}; wanted floating-point numbers: sequence.float().")
    mask = _mask(sequence, lengths)
    if reduction == "max":
        return sequence.masked_fill(~mask, -torch.inf).amax(0)
    per_sequence = lengths.to(sequence.device).view(-1, *[1] * (sequence.dim() - 2))
    if reduction == "last":
        at = (per_sequence.long() - 1).clamp(0, len(sequence) - 1).expand(1, *sequence.shape[1:])
        return sequence.gather(0, at).squeeze(0)
    wide = torch.promote_types(sequence.dtype, torch.float32)
    total = sequence.masked_fill(~mask, 0.0).sum(0, dtype=wide)
    if reduction == "mean":
        total = total / per_sequence
    return total.to(sequence.dtype)


def _mask(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Returns the mask as `[T, B, 1, ...]`, which broadcasts to the sequence."""
    check_tensor("sequence", sequence)
    check_tensor("lengths", lengths)
    if sequence.dim() < 2 or lengths.shape != sequence.shape[1:2] or len(sequence) == 0:
        raise ParameterError(
            f"got a sequence of shape {list(sequence.shape)} and lengths of shape {list(lengths.shape)}; "
            "wanted [T, B, *step] with T >= 1, and [B]."
        )
    mask = length_mask(lengths, len(sequence)).to(sequence.device)
    return mask.view(*mask.shape, *[1] * (sequence.dim() - 2))
