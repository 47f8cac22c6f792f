"""Steps of a padded batch that count: of each sequence, those that it has."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_count, check_name, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = ["length_mask", "mask_padding", "readout"]

REDUCTIONS = ("mean", "sum", "max", "last")


def length_mask(lengths: Tensor, num_steps: int) -> Tensor:
    """True at the steps that a sequence has, False at its padding.

    Args:
        lengths: `[B]`, whole numbers from 1 to `num_steps`.
        num_steps: `T`.

    Returns:
        `[T, B]`, booleans, on the device of `lengths`.

    Raises:
        ParameterError: `lengths` of another shape or dtype; on the CPU, also a length out of range. To look at numbers
            on a GPU would be to wait for it: nothing is checked there. Leave the lengths on the CPU.

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
    """The sequences with `value` at the steps that are padding, whatever was there; no gradient flows to those.

    Losses and metrics that count or sum spikes, such as `loss.ce_count_loss` and `metrics.accuracy`, are then right for
    sequences of different lengths. Those that divide by the number of steps are not: `readout` is.

    Args:
        sequence: `[T, B, *step]`: what a network returned.
        lengths: `[B]`, whole numbers from 1 to `T`, on the CPU or on the sequence's device.
        value: what to put there.

    Returns:
        `[T, B, *step]`, of the sequence's dtype.

    Raises:
        ParameterError: other shapes; as `length_mask`.

    Example:
        >>> mask_padding(torch.ones(3, 2), torch.tensor([3, 1])).T.tolist()
        [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    check_tensor("sequence", sequence)
    return sequence.masked_fill(~_mask(sequence, lengths), value)


def readout(sequence: Tensor, lengths: Tensor, reduction: str = "mean") -> Tensor:
    """One value per neuron, over the steps that each sequence has; padding does not count, and gets no gradient.

    Of membranes or spikes `[T, B, C]` it makes the scores `[B, C]` that `torch.nn.functional.cross_entropy` takes.

    Args:
        sequence: `[T, B, *step]`: what a network returned.
        lengths: `[B]`, whole numbers from 1 to `T`, on the CPU or on the sequence's device.
        reduction: `"mean"`, over the steps that the sequence has; `"sum"`; `"max"`; or `"last"`, the value at the
            last of its steps.

    Returns:
        `[B, *step]`, of the sequence's dtype; sums of half precision are added up in float32.

    Raises:
        ParameterError: other shapes; whole numbers in the sequence; as `length_mask`.
        UnknownNameError: another reduction.

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
    """`[T, B, 1, ...]`: broadcasts to the sequence."""
    check_tensor("sequence", sequence)
    check_tensor("lengths", lengths)
    if sequence.dim() < 2 or lengths.shape != sequence.shape[1:2] or len(sequence) == 0:
        raise ParameterError(
            f"got a sequence of shape {list(sequence.shape)} and lengths of shape {list(lengths.shape)}; "
            "wanted [T, B, *step] with T >= 1, and [B]."
        )
    mask = length_mask(lengths, len(sequence)).to(sequence.device)
    return mask.view(*mask.shape, *[1] * (sequence.dim() - 2))
