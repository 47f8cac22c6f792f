"""Derivatives of kernels, for calls in eager mode, and for operators under transforms and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import is_forward_mode, is_plain
from flexsn_codegen.functions._by_values import like
from flexsn_codegen.functions._checks import check_batched, is_followed
from flexsn_codegen.functions._forward_mode import tangents_of
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._launch import target_of
from flexsn_codegen.functions._plan import Plan, Trace

Apply = Callable[[Kernel, Sequence[Tensor], Sequence[bool]], Sequence[Tensor]]
Operator = Callable[[list[Tensor], Sequence[Any], Sequence[bool], str], Sequence[Tensor]]
_operators: list[Operator] = []


def by_operator_with(operator: Operator) -> None:
    """Registers the operator that is called instead of a kernel while a compiler, a transform or a mode is active."""
    _operators[:] = [operator]


class Differentiated(torch.autograd.Function):
    """A call that is differentiated in reverse or forward mode, or inside of a transform of `torch.func`."""

    @staticmethod
    def forward(
        kernel: Kernel, numbers: Sequence[Any], scalars: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        if not is_plain(list(tensors)):
            return tuple(_operators[0](list(tensors), list(numbers), list(scalars), kernel.key))
        # The trace that the gradient needs is valid for this call, too.
        return tuple(
            kernel.run(tensors, numbers, _list_requested(tensors, [t.requires_grad for t in tensors]), (), scalars)[0]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kernel, numbers, scalars, *tensors = inputs
        setup(ctx, kernel, numbers, scalars, tensors, output, _list_requested(tensors, ctx.needs_input_grad[3:]))
        ctx.results = [(r.shape, r.dtype) for r in output]
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        def apply(kernel: Kernel, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
            return call(kernel, tensors, ctx.numbers, scalars, summed=True)

        return (None, None, None, *gradients(ctx, ctx.saved_tensors, cotangents, ctx.needs_input_grad[3:], apply))

    @staticmethod
    def jvp(ctx: Any, _kernel: None, _numbers: None, _scalars: None, *tangents: Tensor | None) -> Any:
        def apply(kernel: Kernel, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
            return call(kernel, tensors, ctx.numbers, scalars)

        tensors, flows = ctx.saved_tensors, ctx.differentiable
        return tuple(tangents_of(ctx.kernel, tensors, ctx.numbers, ctx.scalars, tangents, ctx.results, flows, apply))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], kernel: Kernel, numbers: Any, scalars: Any, *tensors: Tensor
    ) -> tuple[Any, Any]:
        if kernel.cuts:
            kernel, batch = kernel.batched(), _expand_batch(info.batch_size, tensors, in_dims[3:])
        else:
            batch = batch_first(tensors, in_dims[3:])
        results = Differentiated.apply(kernel, numbers, scalars, *batch)
        return results, (0,) * len(results)


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """A call that autograd follows, with the data that is needed to repeat the call.

    Attributes:
        requested: for each tensor, True if it required a gradient.
        differentiable: for each result, True if a gradient can flow through it.
        backwards: the traces and plans of gradients, by the requested gradients and the layouts of the cotangents.
    """

    kernel: Kernel
    trace: Trace
    plan: Plan
    scalars: tuple[bool, ...]
    requested: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    backwards: dict[tuple[Any, ...], tuple[Trace, Plan]] = field(default_factory=dict)


class Repeated(torch.autograd.Function):
    """Like `Differentiated`, for a call that repeats an earlier call outside of transforms and forward mode."""

    @staticmethod
    def forward(ctx: Any, trained: TrainedCall, numbers: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trained, ctx.numbers = trained, numbers
        results = trained.plan.run(tensors, trained.trace.words(numbers))
        if not all(trained.differentiable):
            flows = zip(results, trained.differentiable, strict=True)
            ctx.mark_non_differentiable(*(result for result, is_present in flows if not is_present))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        trained: TrainedCall = ctx.trained
        tensors, requested = ctx.saved_tensors, ctx.needs_input_grad[2:]
        present = [c for c, flows in zip(cotangents, trained.differentiable, strict=True) if flows and c is not None]
        inputs = [*tensors, *present]
        check_batched(present)
        is_plain_call = present and not torch.is_grad_enabled() and is_plain(inputs)
        is_plain_call = is_plain_call and not any(c._is_zerotensor() or c.is_neg() for c in present)
        key = (requested, *(None if c is None else (c.shape, c.stride(), c.dtype, c.device) for c in cotangents))
        result = trained.backwards.get(key) if is_plain_call else None
        if result is not None and result[0].fits(ctx.numbers):
            trace, plan = result
            results = iter(plan.run(inputs, trace.words(ctx.numbers)))
            tensor_gradients = [
                _sum_to(next(results), t) if w else None for t, w in zip(tensors, requested, strict=True)
            ]
            return None, None, *tensor_gradients
        ctx.kernel, ctx.scalars, ctx.requested = trained.kernel, list(trained.scalars), list(trained.requested)
        ctx.differentiable = trained.differentiable

        def apply(kernel: Kernel, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
            if not is_plain_call:
                return call(kernel, tensors, ctx.numbers, scalars, summed=True)
            results, trace = kernel.run(tensors, ctx.numbers, [False] * len(tensors), (), scalars, summed=True)
            trained.backwards[key] = trace, kernel.plan(trace, tensors)
            return results

        return None, None, *gradients(ctx, tensors, cotangents, requested, apply)


def call(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    scalars: Sequence[bool] | None = None,
    *,
    summed: bool = False,
) -> Sequence[Tensor]:
    """The results of a kernel that writes only to new memory, with derivatives if autograd needs them.

    Args:
        scalars: see `Kernel.variant`.
        summed: see `Kernel.run`. Ignored if derivatives are needed, or if a transform or a mode is active.
    """
    # Zeros that autograd creates may have no memory, so they are copied.
    tensors = [t.clone() if t._is_zerotensor() else t for t in tensors]
    flags = tuple(t.dim() == 0 for t in tensors) if scalars is None else tuple(scalars)
    if not is_plain(tensors) or is_followed(tensors):
        results: Sequence[Tensor] = Differentiated.apply(kernel, tuple(numbers), flags, *tensors)
        return results
    return kernel.run(tensors, numbers, [False] * len(tensors), (), flags, summed=summed)[0]


def setup(
    ctx: Any,
    kernel: Kernel,
    numbers: Sequence[Any],
    scalars: Sequence[bool],
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    requested: Sequence[bool],
) -> None:
    """Saves a call's arguments in `ctx` for the gradient, and marks results that have no gradient."""
    traced = kernel.variant(tensors, like(numbers), requested, target_of(tensors[0].device), scalars).graph
    ctx.kernel, ctx.numbers, ctx.scalars, ctx.requested = kernel, numbers, list(scalars), list(requested)
    ctx.differentiable = traced.differentiable
    ctx.mark_non_differentiable(*(r for r, flows in zip(results, traced.differentiable, strict=True) if not flows))
    ctx.save_for_backward(*tensors)


def gradients(
    ctx: Any, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], requested: Sequence[bool], apply: Apply
) -> Sequence[Tensor | None]:
    """The gradients of a call's tensors.

    Args:
        ctx: a context with the attributes that `setup` sets.
        tensors: the tensors that the context has saved. The caller unpacks the tensors, because activation
            checkpointing only allows this once.
        apply: calls the kernel of the gradient.
    """
    differentiable = ctx.differentiable
    check_batched(cotangents)
    if any(requested) and list(requested) != ctx.requested:
        target = target_of(tensors[0].device)
        traced = ctx.kernel.variant(tensors, like(ctx.numbers), requested, target, ctx.scalars).graph
        differentiable = traced.differentiable
    present = [flows and c is not None for c, flows in zip(cotangents, differentiable, strict=True)]
    present_cotangents = [c for c, flows in zip(cotangents, present, strict=True) if c is not None and flows]
    if not present_cotangents or not any(requested):
        return [None] * len(tensors)
    gradient = ctx.kernel.gradient(tuple(requested), present)
    results = iter(apply(gradient, [*tensors, *present_cotangents], [*ctx.scalars, *[False] * len(present_cotangents)]))
    return [
        _sum_to(next(results), t) if is_requested else None for t, is_requested in zip(tensors, requested, strict=True)
    ]


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient to the shape of its tensor, and converts the gradient to the tensor's dtype.

    A gradient that already has this shape and dtype is returned as the same object, not as a view.
    """
    result = gradient if gradient.shape == like.shape else gradient.sum_to_size(like.shape)
    return result.to(like.dtype)


def _list_requested(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[bool]:
    """For each tensor, True if the call is differentiated with respect to this tensor.

    In forward mode, or if no tensor is marked as needed, this includes all floating-point tensors, because torch does
    not report the tensors with respect to which forward mode or an outer transform differentiates.
    """
    if is_forward_mode() or not any(needed):
        return [is_needed or t.is_floating_point() for t, is_needed in zip(tensors, needed, strict=True)]
    return list(needed)


def _expand_batch(size: int, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Views `[batch, ...]` of all tensors."""
    pairs = zip(tensors, dims, strict=True)
    return [t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in pairs]


def batch_first(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Views of the tensors that broadcast to `[batch, *shape]`."""
    ranks = [t.dim() - (dim is not None) for t, dim in zip(tensors, dims, strict=True)]
    max_rank = max(ranks)
    moved = []
    for tensor, dim, rank in zip(tensors, dims, ranks, strict=True):
        if dim is None:
            moved.append(tensor)
            continue
        first = tensor.movedim(dim, 0)
        moved.append(
            first.reshape(first.shape[0], *(1,) * (max_rank - rank), *first.shape[1:]) if max_rank > rank else first
        )
    return moved
