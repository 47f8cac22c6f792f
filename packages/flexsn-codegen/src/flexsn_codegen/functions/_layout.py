"""Where the elements of broadcasting, strided tensors are, for a kernel that counts them from 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError
from flexsn_codegen.source._source import DENSE


@dataclass(frozen=True, slots=True)
class Plan:
    """How a kernel walks its arguments.

    Attributes:
        shape: what the arguments broadcast to.
        strides: of the results; memory without holes, in the order in which the kernel counts.
        layouts: for each argument `DENSE`, or the number of terms of its offset
            `Σ_i off // inner_i % size_i * stride_i`.
        numbers: for each argument, `inner_i, size_i, stride_i` of each term.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layouts: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    @property
    def dimensions(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a result."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


def plan_layout(tensors: Sequence[Tensor]) -> Plan:
    """The plan for these tensors. `ArgumentError` where they do not broadcast."""
    shapes = [tuple(t.shape) for t in tensors]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ArgumentError(
            f"the arguments' shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast."
        ) from None
    strides = _result_strides(tensors, shape)
    # Outermost first. Dimensions of one element are nowhere.
    order = [d for d in sorted(range(len(shape)), key=lambda d: -strides[d]) if shape[d] != 1]
    sizes = [shape[d] for d in order]
    layouts, numbers = [], []
    for tensor in tensors:
        expanded = tensor.expand(shape).stride()
        terms = _terms(sizes, [expanded[d] for d in order])
        dense = math.prod(shape) == 1 or terms == [(1, math.prod(shape), 1)]
        layouts.append(DENSE if dense else len(terms))
        numbers.append(() if dense else tuple(itertools.chain.from_iterable(terms)))
    return Plan(shape, strides, tuple(layouts), tuple(numbers))


def _result_strides(tensors: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """As the first argument of full shape, if its memory has no holes; else contiguous."""
    for tensor in tensors:
        if tuple(tensor.shape) == shape:
            # Meta: the strides alone are wanted.
            return tuple(torch.empty_like(tensor, device="meta").stride())
    return tuple(torch.empty(shape, device="meta").stride())


def _terms(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """`(inner, size, stride)` per run of dimensions that is one evenly spaced run in memory."""
    terms: list[tuple[int, int, int]] = []
    inner = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if terms and terms[-1][1] * terms[-1][2] == stride:
            before, count, step = terms[-1]
            terms[-1] = (before, count * size, step)
        else:
            terms.append((inner, size, stride))
        inner *= size
    return [term for term in terms if term[2] != 0]
