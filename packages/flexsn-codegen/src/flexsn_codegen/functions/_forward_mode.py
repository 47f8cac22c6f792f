"""Forward-mode derivatives of pointwise kernels.

The gradients of the arguments are a linear function of the gradients of the results. If this linear function is
differentiated in reverse mode with the arguments' tangents as cotangents, the gradients are the results' tangents. A
kernel computes these gradients from the arguments and their tangents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flexsn_codegen.functions._by_values import like
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._launch import target_of

Apply = Callable[[Any, Sequence[Tensor], Sequence[bool]], Sequence[Tensor]]


def tangents_of(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    scalars: Sequence[bool],
    tangents: Sequence[Tensor | None],
    results: Sequence[tuple[Sequence[Any], Any]],
    differentiable: Sequence[bool],
    apply: Apply,
) -> list[Tensor | None]:
    """The tangents of a kernel's results.

    Args:
        tensors: all tensors, with the captured tensors last.
        scalars: for each tensor, True if it promotes as a tensor without dimensions.
        tangents: for each tensor, its tangent, or `None`.
        results: shape and dtype of each result.
        differentiable: for each result, True if autograd needs its tangent. A tangent to which no argument contributes
            consists of zeros.
        apply: calls another kernel with some tensors and their `scalars`, so that this call can be differentiated.

    Returns:
        For each result, its tangent, or `None` if autograd does not need the tangent.
    """
    requested, values = [tangent is not None for tangent in tangents], like(numbers)
    flows = kernel.variant(tensors, values, requested, target_of(tensors[0].device), scalars).graph.differentiable
    zeros = [tensors[0].new_zeros((), dtype=dtype).expand(tuple(shape)) for shape, dtype in results]
    roots = [zero for zero, is_present in zip(zeros, flows, strict=True) if is_present]
    result = (
        iter(_compute_tangents(kernel, tensors, values, scalars, tangents, flows, roots, apply)) if roots else iter(())
    )
    derivatives = [next(result).to(z.dtype) if is_present else z for z, is_present in zip(zeros, flows, strict=True)]
    return [d if is_differentiable else None for d, is_differentiable in zip(derivatives, differentiable, strict=True)]


def _compute_tangents(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    scalars: Sequence[bool],
    tangents: Sequence[Tensor | None],
    flows: Sequence[bool],
    roots: Sequence[Tensor],
    apply: Apply,
) -> Sequence[Tensor]:
    """The tangents of the results that have tangents.

    Args:
        flows: for each result, True if it has a tangent.
        roots: zeros in the shapes and dtypes of these results.
    """
    target = target_of(tensors[0].device)
    gradient = kernel.gradient([tangent is not None for tangent in tangents], flows)
    inputs, input_scalars = [*tensors, *roots], [*scalars, *[False] * len(roots)]
    by_roots = [False] * len(tensors) + [True] * len(roots)
    linear = gradient.variant(inputs, numbers, by_roots, target, input_scalars).graph
    present_tangents = [
        # A kernel on whole tensors returns the terms of all gradients in one shape.
        (tangent if kernel.cuts else tangent.expand(roots[0].shape)).to(dtype)
        for tangent, dtype, is_present in zip(
            [t for t in tangents if t is not None], linear.dtypes, linear.differentiable, strict=True
        )
        if is_present
    ]
    if not present_tangents:  # the derivative is zero for all arguments
        return roots
    linear_map = gradient.gradient(by_roots, linear.differentiable)
    return apply(linear_map, [*inputs, *present_tangents], [*input_scalars, *[False] * len(present_tangents)])
