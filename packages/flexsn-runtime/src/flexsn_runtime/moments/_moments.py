"""Mean and variance per channel: a function, and an operator for compilers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.backend import why_unavailable
from flexsn_runtime.calls._recorded import written_by_kernel
from flexsn_runtime.moments._launch import Running, moments
from flexsn_runtime.native import RepeatedFunction

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_moments(x: Tensor) -> bool:
    """True if kernels can compute the moments of `x`: `x` is floating-point and on a device with Triton kernels."""
    return x.dtype in _DTYPES and why_unavailable(x.device) is None


def batch_moments(
    x: Tensor,
    running: tuple[Tensor, Tensor] | None = None,
    momentum: float = 0.0,
    tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Computes mean and variance over all but the second dimension, without autograd.

    The results are as exact as if the data were centred, and they are bitwise equal in every run.

    Args:
        x: tensor `[N, C, ...]`.
        running: running mean and variance `[C]`, float32, which are updated with `momentum`, as by
            `torch.nn.functional.batch_norm`. If `x` is float64, they cannot be updated, and the result is `None`.
        momentum: weight of the batch in the update.
        tracked: int64 counter of batches, which is incremented. Without `running`, it is ignored.

    Returns:
        Mean and variance `[C]`, in float64 if `x` is float64, otherwise in float32. The variance is the mean squared
            deviation from the mean. If no kernel can run, returns `None` and changes nothing. For example, no kernel
            can run for tensors for which `has_moments` is False, for wrapped tensors, and for tensors with fewer than
            two elements per channel.
    """
    if type(x) is not Tensor or transform_at_work() is not None or not has_moments(x) or x.numel() < 2 * x.shape[1]:
        return None
    if running is None:
        mean, var = _make_moments(None, False)((x,))
        return mean, var
    running_tensors = [*running] if tracked is None else [*running, tracked]
    statistics = [statistic.detach() for statistic in running_tensors]
    if (
        any(type(statistic) is not Tensor or not statistic.is_contiguous() for statistic in statistics)
        or x.dtype == torch.float64
    ):
        return None
    mean, var = _make_moments(momentum, tracked is not None)((x, *statistics))
    return mean, var


@functools.lru_cache(maxsize=64)
def _make_moments(momentum: float | None, tracks: bool) -> RepeatedFunction:
    """Returns a function that computes the moments of `x`.

    Without a momentum, the function takes `[x]`. With a momentum, the function takes `[x, mean, var]`, and also updates
    the running moments `mean` and `var`. If `tracks` is True, the function takes `[x, mean, var, counter]`, and also
    increments the counter.
    """

    def run(tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        x, *others = tensors
        if momentum is None:
            return moments(x, None)
        mean_and_var = moments(x, Running(others[0], others[1], momentum, others[2] if tracks else None))
        written_by_kernel(others)
        return mean_and_var

    return RepeatedFunction(run)


# -- for compilers -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("flexsn::batch_moments", mutates_args=())
def batch_moments_op(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and variance of `x [N, C, ...]`, like `batch_moments`. The results are differentiable twice."""
    moments = batch_moments(x.detach())
    return _compute_by_torch(x) if moments is None else moments


def _compute_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(kind), [0, *range(2, x.dim())], correction=0)
    return mean, var


@batch_moments_op.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=kind), x.new_empty(x.shape[1], dtype=kind)


def _setup(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[0])


def _backward(ctx: Any, of_mean: Tensor | None, of_var: Tensor | None) -> Tensor | None:
    x, mean = ctx.saved_tensors
    shape = (-1, *(1,) * (x.dim() - 2))
    count = x.numel() // x.shape[1]
    gradient = None
    if of_mean is not None:
        gradient = (of_mean / count).view(shape).expand(x.shape)
    if of_var is not None:
        through = (x.to(mean.dtype) - mean.view(shape)) * (2.0 / count * of_var).view(shape)
        gradient = through if gradient is None else gradient + through
    return None if gradient is None else gradient.to(x.dtype)


batch_moments_op.register_autograd(_backward, setup_context=_setup)


@batch_moments_op.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    (dim,) = in_dims
    assert dim is not None
    batched = x.movedim(dim, 0)
    kind = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(batched.to(kind), [1, *range(3, batched.dim())], correction=0)
    return (mean, var), (0, 0)
