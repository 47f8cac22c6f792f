"""Derivatives of pointwise kernels by the shortest road; `_pointwise_op` is the same for compilers and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import is_forward_mode, is_plain
from flexsn_codegen.functions._checks import is_followed
from flexsn_codegen.functions._cut import CutFunction
from flexsn_codegen.functions._forward_mode import tangents_of
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.functions._pointwise_op import pointwise_op


class WithGradients(torch.autograd.Function):
    """A launch that autograd follows, in reverse or forward."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel | CutFunction, numbers: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = list(ctx.needs_input_grad[2:])
        if is_forward_mode():  # of which tensors, is not told beforehand
            wanted = [need or t.is_floating_point() for t, need in zip(tensors, wanted, strict=True)]
        results, variant = kernel.run(tensors, numbers, wanted)
        ctx.kernel, ctx.numbers, ctx.wanted = kernel, numbers, wanted
        ctx.differentiable = variant.traced.differentiable
        ctx.results = [(r.shape, r.dtype) for r in results]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        fixed = (result for result, flows in zip(results, ctx.differentiable, strict=True) if not flows)
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[2:])
        differentiable = ctx.differentiable
        if wanted != ctx.wanted:
            target = target_on(tensors[0].device, ctx.kernel.name)
            differentiable = ctx.kernel.variant(tensors, ctx.numbers, wanted, target).traced.differentiable
        there = [flows and c is not None for c, flows in zip(cotangents, differentiable, strict=True)]
        given = [c for c, flows in zip(cotangents, there, strict=True) if c is not None and flows]
        if not given:
            return (None,) * (2 + len(tensors))
        gradient = ctx.kernel.gradient(wanted, there)
        every = [*tensors, *given]
        found = iter(_applied(gradient, every, ctx.numbers))
        return (
            None,
            None,
            *(
                next(found).sum_to_size(t.shape).to(t.dtype) if want else None
                for t, want in zip(tensors, wanted, strict=True)
            ),
        )

    @staticmethod
    def jvp(ctx: Any, _kernel: None, _numbers: None, *tangents: Tensor | None) -> Any:
        def apply(kernel: Any, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
            return _applied(kernel, list(tensors), ctx.numbers)

        tensors = ctx.saved_tensors
        scalars = [t.dim() == 0 for t in tensors]
        flows = ctx.differentiable
        return tuple(tangents_of(ctx.kernel, tensors, ctx.numbers, scalars, tangents, ctx.results, flows, apply))


def _applied(kernel: Kernel | CutFunction, tensors: list[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
    results: Sequence[Tensor]
    # Zeros that autograd makes may have no memory.
    tensors = [t.clone() if t._is_zerotensor() else t for t in tensors]
    if not is_plain(tensors):
        results = pointwise_op(tensors, numbers, [t.dim() == 0 for t in tensors], kernel.key)
    elif is_followed(tensors):
        # Recorded, if gradients of gradients are wanted: it is such a kernel itself.
        results = WithGradients.apply(kernel, numbers, *tensors)
    else:
        results = kernel.run(tensors, numbers, [False] * len(tensors))[0]
    return results
