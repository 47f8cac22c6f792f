"""Metrics for a network's output spikes. Sequences are `[T, B, C]`: steps, batch, classes."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_count, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = ["accuracy", "first_spike_accuracy", "time_to_first_spike"]


def accuracy(spikes: Tensor, targets: Tensor, num_classes: int | None = None) -> Tensor:
    """Computes the fraction of samples in which the neuron of the correct class has the most spikes.

    If several neurons have equally many spikes, only the first of these neurons counts.

    Args:
        spikes: `[T, B, C]`, or membranes of this shape, which are summed over time.
        targets: `[B]`, class numbers.
        num_classes: for a population code, number of equally large, consecutive groups of the `C` neurons.

    Returns:
        A scalar in `[0, 1]`, on the device of `spikes`.

    Raises:
        ParameterError: shapes do not match, or `C` is not a multiple of `num_classes`.

    Example:
        >>> spikes = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
        >>> accuracy(spikes, torch.tensor([0, 0])).item()
        0.5
    """
    _check(spikes, targets)
    counts = spikes.detach().sum(0, dtype=torch.promote_types(spikes.dtype, torch.float32))
    if num_classes is not None:
        check_count("num_classes", num_classes)
        if counts.shape[1] % num_classes:
            raise ParameterError(f"{counts.shape[1]} neurons are not a population code of {num_classes} classes.")
        counts = counts.unflatten(1, (num_classes, -1)).sum(2)
    return (_find_first(counts == counts.amax(1, keepdim=True)) == targets).float().mean()


def time_to_first_spike(spikes: Tensor) -> Tensor:
    """Returns the step of each neuron's first spike, counted from 0; `T` for a neuron without spikes.

    Args:
        spikes: `[T, *step]`, `T >= 1`. Every nonzero value is a spike.

    Returns:
        `[*step]`, int64.

    Example:
        >>> time_to_first_spike(torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])).tolist()
        [1, 0, 2]
    """
    check_tensor("spikes", spikes)
    if spikes.dim() < 1 or len(spikes) == 0:
        raise ParameterError(f"got a sequence of shape {list(spikes.shape)}; expected [T, *step] with T >= 1.")
    steps = torch.arange(len(spikes), device=spikes.device).view(-1, *[1] * (spikes.dim() - 1))
    return torch.where(spikes != 0, steps, len(spikes)).amin(0)


def first_spike_accuracy(spikes: Tensor, targets: Tensor) -> Tensor:
    """Computes the fraction of samples in which the neuron of the correct class spikes first.

    If several neurons spike first at the same step, only the first of these neurons counts. A sample without spikes
    counts as wrong.

    Args:
        spikes: `[T, B, C]`.
        targets: `[B]`, class numbers.

    Returns:
        A scalar in `[0, 1]`, on the device of `spikes`.

    Raises:
        ParameterError: shapes do not match.

    Example:
        >>> spikes = torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]])
        >>> first_spike_accuracy(spikes, torch.tensor([1])).item()
        1.0
    """
    _check(spikes, targets)
    times = time_to_first_spike(spikes)
    earliest = times.amin(1, keepdim=True)
    return ((_find_first(times == earliest) == targets) & (earliest.squeeze(1) < len(spikes))).float().mean()


def _find_first(candidates: Tensor) -> Tensor:
    """Returns the index of the first candidate, `[B, C] -> [B]`. `argmax` may return the index of a later candidate."""
    classes = torch.arange(candidates.shape[1], device=candidates.device)
    return torch.where(candidates, classes, len(classes)).amin(1)


def _check(sequence: Tensor, targets: Tensor) -> None:
    check_tensor("spikes", sequence)
    check_tensor("targets", targets)
    if sequence.dim() != 3 or targets.shape != sequence.shape[1:2] or not sequence.numel():
        raise ParameterError(
            f"got a sequence of shape {list(sequence.shape)} and targets of shape {list(targets.shape)}; expected "
            "[T, B, C] and [B], not empty."
        )
