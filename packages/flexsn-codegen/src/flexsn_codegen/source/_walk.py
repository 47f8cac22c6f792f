"""Offsets of the elements of strided operands, for a kernel that counts elements from 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from flexsn_codegen.source._source import DENSE, RUN, Like, StepLayout


def by_terms(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[StepLayout, ...], list[int]]:
    """The layout of each operand, and the integers in the terms of all layouts, operand by operand.

    A layout is `DENSE`, or the number of terms of the offset `Σ_i off // inner_i % size_i * stride_i`. The integers in
    a term are `inner_i, size_i, stride_i`, in this order.

    Args:
        sizes: sizes of the dimensions, outermost first, without dimensions of one element.
        strides: strides of each operand.
    """
    layouts: list[StepLayout] = []
    integers: list[int] = []
    numel = math.prod(sizes)
    for operand_strides in strides:
        terms = terms_of(sizes, operand_strides)
        dense = numel == 1 or terms == [(1, numel, 1)]
        layouts.append(DENSE if dense else len(terms))
        integers += () if dense else itertools.chain.from_iterable(terms)
    return tuple(layouts), integers


def by_runs(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[StepLayout | Like, ...], list[int]]:
    """Like `by_terms`, with two additional layouts.

    An operand with evenly spaced elements has the layout `RUN`, and its stride is the only integer. An operand whose
    elements have the same offsets as those of an earlier operand has the layout `Like`, and no integers, unless it is
    dense or a single number.
    """
    layouts: list[StepLayout | Like] = []
    integers: list[int] = []
    numel = math.prod(sizes)
    first: dict[tuple[tuple[int, int, int], ...], int] = {}
    for i, operand_strides in enumerate(strides):
        terms = terms_of(sizes, operand_strides)
        # Symbols of a compiler are not compared, because the graph would then only be valid for their current values.
        has_no_symbols = all(type(value) is int for term in terms for value in term)
        first_index = first.setdefault(tuple(terms), i) if has_no_symbols else i
        if first_index != i and terms and layouts[first_index] != DENSE:
            layouts.append(Like(first_index))
            continue
        if numel != 1 and len(terms) == 1 and terms[0][:2] == (1, numel) and terms[0][2] != 1:
            layouts.append(RUN)
            integers.append(terms[0][2])
        else:
            (layout,), operand_integers = by_terms(sizes, [operand_strides])
            layouts.append(layout)
            integers += operand_integers
    return tuple(layouts), integers


def terms_of(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """The term `(inner, size, stride)` of each group of dimensions whose elements are evenly spaced in memory.

    Groups with a stride of 0 have no term.
    """
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
