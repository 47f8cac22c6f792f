"""Gradients of pointwise kernels by the shortest road; `_pointwise_op` is the same for compilers and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._cut import CutFunction
from flexsn_codegen._kernel import Kernel
from flexsn_codegen._pointwise_op import pointwise_op
from flexsn_codegen._torch_private_modes import is_plain


class WithGradients(torch.autograd.Function):
    """A launch that autograd follows."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel | CutFunction, numbers: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[2:]
        results, variant = kernel.run(tensors, numbers, wanted)
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.differentiable = variant.traced.differentiable
        ctx.save_for_backward(*tensors)
        fixed = (result for result, flows in zip(results, ctx.differentiable, strict=True) if not flows)
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        given = [c for c, flows in zip(cotangents, ctx.differentiable, strict=True) if flows]
        if not given:
            return (None,) * (2 + len(tensors))
        gradient = ctx.kernel.gradient(wanted, ctx.differentiable)
        every = [*tensors, *given]
        if not is_plain(every):
            results = pointwise_op(every, ctx.numbers, [t.dim() == 0 for t in every], gradient.key)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in every):
            # Recorded, if gradients of gradients are wanted: it is such a kernel itself.
            results = WithGradients.apply(gradient, ctx.numbers, *every)
        else:
            results = gradient.run(every, ctx.numbers, [False] * len(every))[0]
        found = iter(results)
        return None, None, *(
            next(found).sum_to_size(t.shape).to(t.dtype) if want else None
            for t, want in zip(tensors, wanted, strict=True)
        )
