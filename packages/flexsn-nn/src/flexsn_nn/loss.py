"""Losses for spikes and membranes. Sequences are `[T, B, C]`: steps, batch, classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from flexsn_nn._checks import check_number, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = [
    "ce_count_loss",
    "ce_max_membrane_loss",
    "ce_rate_loss",
    "l1_rate_sparsity",
    "mse_count_loss",
    "mse_membrane_loss",
]


def ce_rate_loss(spikes: Tensor, targets: Tensor) -> Tensor:
    """Computes the cross entropy of the spikes at every step, averaged over steps and batch.

    Args:
        spikes: `[T, B, C]`.
        targets: `[B]`, class numbers.

    Returns:
        A scalar.

    Example:
        >>> spikes = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
        >>> round(ce_rate_loss(spikes, torch.tensor([0])).item(), 4)  # the mean of 0.3133 and ln 2
        0.5032
    """
    _check(spikes, targets)
    return cross_entropy(spikes.flatten(0, 1), targets.repeat(len(spikes)))


def ce_count_loss(spikes: Tensor, targets: Tensor) -> Tensor:
    """Computes the cross entropy of the spike counts, averaged over the batch.

    Args:
        spikes: `[T, B, C]`.
        targets: `[B]`, class numbers.

    Returns:
        A scalar.

    Example:
        >>> spikes = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
        >>> round(ce_count_loss(spikes, torch.tensor([0])).item(), 4)
        0.1269
    """
    _check(spikes, targets)
    return cross_entropy(spikes.sum(0), targets)


def ce_max_membrane_loss(v: Tensor, targets: Tensor) -> Tensor:
    """Computes the cross entropy of each membrane's maximum over time, averaged over the batch.

    Args:
        v: `[T, B, C]`, membranes.
        targets: `[B]`, class numbers.

    Returns:
        A scalar.

    Example:
        >>> v = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
        >>> round(ce_max_membrane_loss(v, torch.tensor([0])).item(), 4)
        0.3133
    """
    _check(v, targets)
    return cross_entropy(v.amax(0), targets)


def mse_count_loss(spikes: Tensor, targets: Tensor, correct_rate: float = 1.0, incorrect_rate: float = 0.0) -> Tensor:
    """Computes the mean squared difference between spike counts and target counts, divided by `T`.

    The target counts are `T` times the target rates.

    Args:
        spikes: `[T, B, C]`.
        targets: `[B]`, class numbers.
        correct_rate: target rate of the correct class's neuron, in spikes per step, in [0, 1].
        incorrect_rate: target rate of the other neurons.

    Returns:
        A scalar.

    Example:
        >>> spikes = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
        >>> mse_count_loss(spikes, torch.tensor([0])).item()  # counts 1 and 0; targets 2 and 0
        0.25
    """
    _check(spikes, targets)
    check_number("correct_rate", correct_rate, at_least=0, at_most=1)
    check_number("incorrect_rate", incorrect_rate, at_least=0, at_most=1)
    target_counts = _create_targets(spikes[0], targets, correct_rate, incorrect_rate) * len(spikes)
    return mse_loss(spikes.sum(0), target_counts) / len(spikes)


def mse_membrane_loss(v: Tensor, targets: Tensor, on_target: float = 1.0, off_target: float = 0.0) -> Tensor:
    """Computes the mean squared difference between the membranes and their targets.

    Args:
        v: `[T, B, C]`, membranes.
        targets: `[B]`, class numbers; or `[T, B, C]`, the target membranes.
        on_target, off_target: for class numbers, the targets of the correct class's membrane and of the other
            membranes at every step.

    Returns:
        A scalar.

    Example:
        >>> v = torch.tensor([[[0.5, 0.0]], [[1.0, 0.0]]])
        >>> mse_membrane_loss(v, torch.tensor([0])).item()
        0.0625
    """
    check_tensor("v", v)
    check_tensor("targets", targets)
    if targets.shape == v.shape:
        return mse_loss(v, targets)
    _check(v, targets)
    return mse_loss(v, _create_targets(v[0], targets, on_target, off_target).expand_as(v))


def l1_rate_sparsity(spikes: Tensor, Lambda: float = 1e-5) -> Tensor:
    """Computes `Lambda` times the number of spikes. Add this term to a loss to reduce the number of spikes.

    Args:
        spikes: any shape.
        Lambda: weight of the term, at least 0.

    Returns:
        A scalar.

    Example:
        >>> l1_rate_sparsity(torch.ones(2, 3), Lambda=0.5).item()
        3.0
    """
    check_tensor("spikes", spikes)
    check_number("Lambda", Lambda, at_least=0)
    return Lambda * spikes.sum()


def _create_targets(like: Tensor, targets: Tensor, on: float, off: float) -> Tensor:
    """Creates targets `[B, C]`: `on` for the correct class, and `off` for the other classes."""
    return off + (on - off) * one_hot(targets, like.shape[-1]).to(like.dtype)


def _check(sequence: Tensor, targets: Tensor) -> None:
    check_tensor("the sequence", sequence)
    check_tensor("targets", targets)
    if sequence.dim() != 3 or targets.shape != sequence.shape[1:2] or len(sequence) == 0:
        raise ParameterError(
            f"got a sequence of shape {list(sequence.shape)} and targets of shape {list(targets.shape)}; "
            "expected [T, B, C] with T >= 1, and [B]."
        )
    if targets.dtype is not torch.int64:
        raise ParameterError(f"targets are {targets.dtype}; expected class numbers: targets.long().")
