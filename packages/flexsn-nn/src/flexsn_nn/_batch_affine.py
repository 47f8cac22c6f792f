"""Batch normalisation, split into statistics and an affine function that the neuron's step computes.

    y = weight (x - mean) / sqrt(var + eps) + bias = (x - mean) scale + shift

The statistics and the running statistics equal those of `torch.nn.functional.batch_norm`. The gradient through the
statistics needs two sums per channel: the sum of the gradient of `y`, and the sum of its product with `x - mean`. These
sums are the gradients of `shift` and `scale`, which kernels always compute.

Sources: Ioffe and Szegedy, "Batch normalization", ICML 2015; for several processes, torch's `SyncBatchNorm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsn_nn._affine import Absorbed, Affine, AffineOfStatistics, FrontParts
from flexsn_nn._backends import COMPILED, choose
from flexsn_nn._torch_private import between_graphs, is_exporting
from flexsn_nn.errors import InputShapeError
from flexsn_nn.transforms._compose import StandIns
from flexsn_runtime import Completion, GradientFormula, ScanProgram, batch_moments, batch_moments_op, has_moments

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_batch_norm(module: object) -> TypeGuard[BatchNorm]:
    """True if a module is one of PyTorch's batch norms, with PyTorch's own `forward`."""
    return isinstance(module, KINDS) and type(module).forward in (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)


class Normalisation(NamedTuple):
    """A norm before a neuron, over all dimensions except the channels.

    Attributes:
        norm: the module, in training or evaluation mode.
        lead: index of the dimension of the channels: 2 for `[T, B, C, ...]`, 1 for `[B, C, ...]`.
    """

    norm: BatchNorm
    lead: int

    def of(self, x: Tensor) -> Tensor:
        """Applies the norm itself to `x`."""
        frames = self._flatten_time(x)
        normalised: Tensor = self.norm(frames)
        return normalised.unflatten(0, x.shape[:2]) if self.lead == 2 else normalised

    def absorbed(self, x: Tensor) -> tuple[Tensor, Absorbed]:
        """Computes the affine part of the norm, and updates the running statistics as the norm does.

        Returns:
            `x`, and the affine part that the step applies to `x`. The affine part also provides the gradient
            of `x` that flows through the statistics.

        Raises:
            InputShapeError: the number of channels differs from that of the norm, or the statistics of a batch
                are needed, and a channel has only one element.
        """
        norm, compiling = self.norm, torch.compiler.is_compiling()
        frames = self._flatten_time(x if compiling else x.detach())
        mean, var = norm.running_mean, norm.running_var
        if norm.training or mean is None or var is None:
            group = _find_group(norm)
            if compiling:
                if group is not None:
                    x_and_affine: tuple[Tensor, Absorbed] = _normalise_between_graphs(norm, x, self.lead, group)
                    return x_and_affine
                return x, _normalise_in_graph(norm, frames)
            return _normalise_batch(norm, x, frames, group)
        dtype = _get_statistics_dtype(x)
        mean, var = mean.to(dtype), var.to(dtype)
        if compiling:
            return x, _make_affine(norm.weight, norm.bias, mean, torch.rsqrt(var + norm.eps), frames)
        weight, bias = _read_weight_and_bias(norm, mean)
        return x, AffineOfStatistics(mean, var, weight, bias, norm.eps, frames.dim() - 2)

    def parts(self) -> FrontParts | None:
        """Implements `Producer.parts` for norms of one process with weight, bias and float32 running statistics.

        Returns `None` for all other norms. In training, also returns `None` for norms without momentum or without a
        count of batches.
        """
        norm = self.norm
        attributes, parameters, buffers = norm.__dict__, norm._parameters, norm._buffers  # faster than `norm.weight`
        mean, var, tracked = buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
        weight, bias = parameters.get("weight"), parameters.get("bias")
        training, momentum = attributes["training"], attributes["momentum"]
        if mean is None or var is None or weight is None or bias is None or mean.dtype != torch.float32:
            return None
        key = type(norm), self.lead, attributes["num_features"], attributes["eps"]
        if not training:
            return FrontParts(key, (mean, var, weight, bias))
        if (
            momentum is None
            or tracked is None
            or not attributes["track_running_stats"]
            or _find_group(norm) is not None
        ):
            return None
        return FrontParts(
            (*key, momentum), (mean, var, weight, bias), (tracked,), partial(_update, self.lead, momentum)
        )

    def frozen(self) -> Normalisation:
        """Returns a copy of this norm in evaluation mode, which shares the running statistics."""
        twin = copy(self.norm)
        twin.training = False
        return Normalisation(twin, self.lead)

    def _flatten_time(self, x: Tensor) -> Tensor:
        norm = self.norm
        if x.dim() <= self.lead:
            raise InputShapeError(
                f"the input has the shape {list(x.shape)}; in step mode {'s' if self.lead == 1 else 'm'!r} a norm over "
                f"channels takes {'[B, C, ...]' if self.lead == 1 else '[T, B, C, ...]'}."
            )
        frames = x.flatten(0, 1) if self.lead == 2 else x
        norm._check_input_dim(frames)
        if frames.shape[1] != norm.num_features:
            raise InputShapeError(f"the norm has {norm.num_features} channels, and its input {frames.shape[1]}.")
        return frames


def _get_statistics_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a norm computes the statistics of `x`."""
    return torch.promote_types(x.dtype, torch.float32)


def _find_group(norm: BatchNorm) -> Any:
    """Returns the group of processes whose batches this norm combines; `None` if the norm uses only this process."""
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training or not dist.is_available():
        return None
    if not dist.is_initialized():
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _check_count(frames: Tensor) -> int:
    count = frames.numel() // frames.shape[1]
    if count == 1:
        raise InputShapeError(
            f"expected more than 1 value per channel when training; the input has the shape {list(frames.shape)}."
        )
    return count


# -- in compiled graphs -------------------------------------------------------------------------------------


def graph_affine(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Affine:
    """Computes the affine part of `torch.nn.functional.batch_norm`. In training, updates the running statistics.

    The tensors of the affine part are `[C, 1, ...]`.

    Args:
        input: `[B, C, ...]`.
        running_mean, running_var, weight, bias, training, momentum, eps: arguments of `batch_norm`.
    """
    dtype = _get_statistics_dtype(input)
    if training or running_mean is None or running_var is None:
        count = _check_count(input)
        mean, var = _compute_graph_moments(input)
        if running_mean is not None and running_var is not None:
            _move(running_mean, running_var, mean.detach(), var.detach(), count, momentum)
    else:
        mean, var = running_mean.to(dtype), running_var.to(dtype)
    return _make_affine(weight, bias, mean, torch.rsqrt(var + eps), input)


def _normalise_in_graph(norm: BatchNorm, frames: Tensor) -> Affine:
    count = _check_count(frames)
    mean, var = _compute_graph_moments(frames)
    _track(norm, mean.detach(), var.detach(), count)
    return _make_affine(norm.weight, norm.bias, mean, torch.rsqrt(var + norm.eps), frames)


def _compute_graph_moments(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and variance with kernels if available, otherwise with PyTorch's operations."""
    # Wrappers of tensors, such as a DTensor, have no kernels. The fake tensors of compilers count as plain tensors.
    is_plain = type(frames) is Tensor or not hasattr(type(frames), "__tensor_flatten__")
    if is_plain and not is_exporting() and has_moments(frames):
        moments: tuple[Tensor, Tensor] = batch_moments_op(frames)
        return moments
    var, mean = torch.var_mean(frames.to(_get_statistics_dtype(frames)), _list_reduced_dims(frames), correction=0)
    return mean, var


def _make_affine(weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, frames: Tensor) -> Affine:
    shape = frames.shape[1], *(1,) * (frames.dim() - 2)
    scale = invstd if weight is None else invstd * weight
    shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return Affine(mean.view(shape), scale.view(shape), shift.view(shape))


def _list_reduced_dims(frames: Tensor) -> list[int]:
    return [0, *range(2, frames.dim())]


def _track(norm: BatchNorm, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
    """Updates the running statistics if the norm is in training and has running statistics."""
    if not (norm.training and norm.track_running_stats) or norm.running_mean is None or norm.running_var is None:
        return
    with torch.no_grad():
        momentum: float | Tensor | None = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / norm.num_batches_tracked.to(norm.running_mean.dtype)
        momentum = 0.0 if momentum is None else momentum
        _move(norm.running_mean, norm.running_var, mean, var, count, momentum)


@torch.no_grad()
def _move(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    count: int | Tensor,
    momentum: float | Tensor,
) -> None:
    unbiased = var * (count / (count - 1))
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)


# -- eager mode --------------------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """Statistics of a batch, in the dtype in which norms compute.

    Attributes:
        mean, var: one value per channel. The variance is the mean square of the deviations.
        total: number of values per channel, in all processes.
    """

    mean: Tensor
    var: Tensor
    total: int | Tensor


def _normalise_batch(norm: BatchNorm, x: Tensor, frames: Tensor, group: Any) -> tuple[Tensor, Absorbed]:
    batch = _compute_statistics(norm, frames, group)
    weight, bias = _read_weight_and_bias(norm, batch.mean)
    trailing_dims = frames.dim() - 2
    mean, var, total = batch
    absorbed = AffineOfStatistics(mean, var, weight, bias, norm.eps, trailing_dims)
    if not x.requires_grad or not torch.is_grad_enabled():
        return x, absorbed
    formula = _make_formula(mean.shape, mean.dtype, mean.device, norm.eps, trailing_dims)
    share, is_stored = _get_share(total, mean)
    absorbed = absorbed._replace(completion=Completion(formula, (2, 3), (0, 1), (share,)))
    if group is not None or not is_stored:
        return absorbed.joined(x, None if group is None else partial(_sum_over, group))
    return x, absorbed


def _read_weight_and_bias(norm: BatchNorm, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight and bias in the dtype of the statistics."""
    dtype = like.dtype
    weight: Tensor = torch.ones_like(like) if norm.weight is None else norm.weight
    bias: Tensor = torch.zeros_like(like) if norm.bias is None else norm.bias
    if weight.dtype != dtype or bias.dtype != dtype:
        weight, bias = weight.to(dtype), bias.to(dtype)
    return weight, bias


@between_graphs("a norm over several processes runs between the graphs of torch.compile")
def _normalise_between_graphs(norm: BatchNorm, x: Tensor, lead: int, group: Any) -> tuple[Tensor, Absorbed]:
    detached = x.detach()
    return _normalise_batch(norm, x, detached.flatten(0, 1) if lead == 2 else detached, group)


def _compute_statistics(norm: BatchNorm, frames: Tensor, group: Any) -> _Batch:
    """Computes the statistics of a batch, without an autograd graph, and updates the running statistics."""
    if group is not None:
        return _gather_statistics(norm, frames, group)
    count = _check_count(frames)
    if not count:
        zeros = frames.new_zeros(frames.shape[1], dtype=_get_statistics_dtype(frames))
        return _Batch(zeros, torch.ones_like(zeros), 1)
    tracks = norm.training and norm.track_running_stats
    first, second = (norm.running_mean, norm.running_var) if tracks else (None, None)
    if (
        first is not None
        and second is not None
        and first.dtype == _get_statistics_dtype(frames)
        and norm.momentum is not None
    ):
        mean, var = _compute_moments(frames, (first, second), norm.momentum, norm.num_batches_tracked)
    else:
        mean, var = _compute_moments(frames)
        _track(norm, mean, var, count)
    return _Batch(mean, var, count)


def _compute_moments(
    frames: Tensor,
    running: tuple[Tensor, Tensor] | None = None,
    momentum: float = 0.0,
    tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes mean and variance over all dimensions except the channels. Updates `running` and `tracked`."""
    by_kernel = batch_moments(frames, running, momentum, tracked)
    if by_kernel is not None:
        return by_kernel
    if tracked is not None:
        tracked.add_(1)
    dtype = _get_statistics_dtype(frames)
    if frames.device.type not in ("cpu", "cuda"):
        var, mean = torch.var_mean(frames.to(dtype), _list_reduced_dims(frames), correction=0)
        if running is not None:
            _move(*running, mean, var, frames.numel() // frames.shape[1], momentum)
        return mean, var
    if running is None:  # the norm's own statistics may be in half precision, which would round the results
        running = (frames.new_zeros(frames.shape[1], dtype=dtype), frames.new_ones(frames.shape[1], dtype=dtype))
    mean, var = torch.batch_norm_update_stats(frames, running[0], running[1], momentum)
    return (mean, var) if mean.dtype == dtype else (mean.to(dtype), var.to(dtype))


def _update(
    lead: int, momentum: float, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, tracked: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes mean and variance of a batch, and updates the running mean and variance."""
    return _compute_moments(x.flatten(0, 1) if lead == 2 else x, (mean, var), momentum, tracked)


def _gather_statistics(norm: BatchNorm, frames: Tensor, group: Any) -> _Batch:
    """Computes the statistics over the batches of all processes. The batches may differ in size."""
    count = frames.numel() // frames.shape[1]
    own_moments = frames.new_zeros(2, frames.shape[1], dtype=_get_statistics_dtype(frames))
    if count:
        own_moments[0], own_moments[1] = _compute_moments(frames)
    message = torch.cat([own_moments.flatten(), own_moments.new_full((1,), count)])
    messages = message.new_empty(dist.get_world_size(group), len(message))
    dist.all_gather_into_tensor(messages.view(-1), message, group=group)
    counts, moments = messages[:, -1:], messages[:, :-1].view(-1, 2, frames.shape[1])
    total = counts.sum()
    mean = (counts * moments[:, 0]).sum(0) / total
    var = (counts * (moments[:, 1] + (moments[:, 0] - mean).square())).sum(0) / total
    _track(norm, mean, var, total)
    return _Batch(mean, var, total)


# -- the gradient through the statistics, in one pass -------------------------------------------------------


class _ThroughStatistics(StandIns):
    """Gradient of `x`, including the part that flows through the statistics.

    A call computes one step of a scan with stand-ins for the tensors. The method `of` computes the same gradient with
    actual tensors.

    Args:
        like: seven tensors with the layouts of weight, bias, mean, variance, `-1 / count`, the gradient of the weight,
            and the gradient of the bias.
        trailing_dims: number of dimensions after the channels.
    """

    __name__ = "norm_gradient"

    def __init__(self, like: Sequence[Tensor], eps: float, trailing_dims: int) -> None:
        super().__init__(like, (False,) * len(like))
        self.eps, self.trailing_dims = eps, trailing_dims

    def __call__(self, gradient: Tensor, x: Tensor) -> Tensor:
        return self.of(gradient, x, self.stand_ins)

    def of(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Computes the gradient from `tensors` instead of the stand-ins.

        Args:
            gradient: gradient of `x` with constant statistics.
        """
        weight, _, mean, var, share, of_weight, of_bias = (
            tensor.view(-1, *(1,) * self.trailing_dims) for tensor in tensors
        )
        invstd = torch.rsqrt(var + self.eps)
        scale = weight * share * invstd
        deviation = x.to(mean.dtype) - mean
        completed = gradient.to(mean.dtype) + deviation * (scale * invstd * of_weight) + scale * of_bias
        return completed.to(gradient.dtype)


@cache
def _make_formula(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, eps: float, trailing_dims: int
) -> GradientFormula:
    like = torch.empty(shape, dtype=dtype, device=device)
    step = _ThroughStatistics([*[like] * 4, like.new_empty(1), like, like], eps, trailing_dims)
    program = ScanProgram(step, 2, 0, 1, on_cpu="cpp")
    return GradientFormula(step.of, program, step.get_replacements, trailing_dims + 2, _has_kernels)


@cache
def _has_kernels(device: torch.device) -> bool:
    return choose("auto", "m", device, compiling=False).backend in COMPILED


# Entries are never removed, because kernels in CUDA graphs read them.
_MOST_SHARES = 1024
_shares: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _get_share(total: int | Tensor, like: Tensor) -> tuple[Tensor, bool]:
    """Returns a tensor `[1]` with `-1 / total`, and True if later calls with this total may use the same tensor."""
    if isinstance(total, Tensor):
        return (-1.0 / total).to(like.dtype).view(1), False
    key = total, like.dtype, like.device
    share = _shares.get(key)
    if share is None:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return like.new_full((1,), -1.0 / total), False  # this tensor belongs to the graph
        # The copy from the host is synchronous, because other streams also read the tensor.
        share = torch.tensor([-1.0 / total], dtype=like.dtype, device=like.device)
        if len(_shares) >= _MOST_SHARES or type(share) is not Tensor:
            return share, type(share) is Tensor
        _shares[key] = share
    return share, True


def _sum_over(group: Any, sums: list[Tensor]) -> list[Tensor]:
    stacked_sums = torch.stack(sums)
    dist.all_reduce(stacked_sums, group=group)
    return list(stacked_sums)
