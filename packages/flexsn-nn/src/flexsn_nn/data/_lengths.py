"""Masks for the padding in batches of sequences of different lengths, and readouts that exclude the padding."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_count, check_name, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = ["length_mask", "mask_padding", "readout"]

REDUCTIONS = ("mean", "sum", "max", "last")


def length_mask(lengths: Tensor, num_steps: int) -> Tensor:
    """Returns a mask that is True at the steps of each sequence and False at the padding.

    Args:
        lengths: lengths of the sequences, whole numbers `[B]` from 1 to `num_steps`.
        num_steps: number of steps `T`.

    Returns:
        Booleans `[T, B]`, on the device of `lengths`.

    Raises:
        ParameterError: `lengths` have another shape or dtype. On the CPU, also raised if a length is out of range. The
            range is not checked inside of compilers, or on a GPU, because reading the lengths would wait for the GPU.
            For this check, keep the lengths on the CPU.

    Example:
        >>> length_mask(torch.tensor([3, 1]), 3).T.tolist()
        [[True, True, True], [True, False, False]]
    """
    check_count("num_steps", num_steps)
    check_tensor("lengths", lengths)
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise ParameterError(
            f"lengths have the shape {list(lengths.shape)} and {lengths.dtype}; expected [B], whole numbers."
        )
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and len(lengths):
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 1 or high > num_steps:
            raise ParameterError(f"lengths are from {low} to {high}; expected from 1 to {num_steps} (steps).")
    return torch.arange(num_steps, device=lengths.device).unsqueeze(1) < lengths


def mask_padding(sequence: Tensor, lengths: Tensor, value: float = 0.0) -> Tensor:
    """Returns the sequences with `value` at all padding steps. No gradient flows to the padding.

    Losses and metrics that count or sum spikes, such as `loss.ce_count_loss` and `metrics.accuracy`, are correct for
    the result. Losses and metrics that divide by the number of steps are not, because they would also count padding.
    Use `readout` instead.

    Args:
        sequence: output of a network, `[T, B, *step]`.
        lengths: lengths of the sequences, whole numbers `[B]` from 1 to `T`, on the CPU or on the sequence's device.
        value: value for the padding.

    Returns:
        A tensor `[T, B, *step]` with the sequence's dtype.

    Raises:
        ParameterError: the tensors have other shapes, or `length_mask` rejects the lengths.

    Example:
        >>> mask_padding(torch.ones(3, 2), torch.tensor([3, 1])).T.tolist()
        [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    check_tensor("sequence", sequence)
    return sequence.masked_fill(~_mask(sequence, lengths), value)


def readout(sequence: Tensor, lengths: Tensor, reduction: str = "mean") -> Tensor:
    """Reduces the steps of each sequence to one value per neuron. Padding does not count, and gets no gradient.

    From membranes or spikes `[T, B, C]`, `readout` computes the scores `[B, C]` for
    `torch.nn.functional.cross_entropy`.

    Args:
        sequence: output of a network, `[T, B, *step]`.
        lengths: lengths of the sequences, whole numbers `[B]` from 1 to `T`, on the CPU or on the sequence's device.
        reduction: `"mean"`, `"sum"` or `"max"` over the steps of the sequence, or `"last"` for the value at its last
            step.

    Returns:
        A tensor `[B, *step]` with the sequence's dtype. Sums in half precision are computed in float32.

    Raises:
        ParameterError: the tensors have other shapes, the sequence is not floating-point, or `length_mask` rejects the
            lengths.
        UnknownNameError: the reduction is unknown.

    Example:
        >>> spikes = torch.tensor([[1.0, 1.0], [0.0, 1.0]])  # two steps, of two sequences
        >>> readout(spikes, torch.tensor([2, 1])).tolist()
        [0.5, 1.0]
    """
    check_name("reduction", reduction, REDUCTIONS)
    check_tensor("sequence", sequence)
    if not sequence.is_floating_point():
        raise ParameterError(f"the sequence is {sequence.dtype}; expected floating-point numbers: sequence.float().")
    mask = _mask(sequence, lengths)
    if reduction == "max":
        return sequence.masked_fill(~mask, -torch.inf).amax(0)
    per_sequence = lengths.to(sequence.device).view(-1, *[1] * (sequence.dim() - 2))
    if reduction == "last":
        last_step = (per_sequence.long() - 1).clamp(0, len(sequence) - 1).expand(1, *sequence.shape[1:])
        return sequence.gather(0, last_step).squeeze(0)
    sum_dtype = torch.promote_types(sequence.dtype, torch.float32)
    total = sequence.masked_fill(~mask, 0.0).sum(0, dtype=sum_dtype)
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
            "expected [T, B, *step] with T >= 1, and [B]."
        )
    mask = length_mask(lengths, len(sequence)).to(sequence.device)
    return mask.view(*mask.shape, *[1] * (sequence.dim() - 2))
