"""Changes the size of the first dimension of a staged step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexsn_graph.ir._products import Call
from flexsn_graph.staging._staged_step import Product, Stage, StagedStep, Term, View

_aten = torch.ops.aten
_prims = torch.ops.prims
# Ops whose first list of integers contains sizes.
_TO_SIZES = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.expand.default),
        *(_prims.reshape.default, _prims.broadcast_in_dim.default),
    }
)


def is_of_any_batch(staged: StagedStep, step_shape: Sequence[int], lifted_shapes: Sequence[Sequence[int]]) -> bool:
    """True if a step `[batch, features]` can be resized to another size of its first dimension.

    The size of the first dimension must differ from all other sizes, and no captured tensor may vary along this
    dimension.
    """
    if len(step_shape) != 2:
        return False
    if any(product.is_reduction and product.args[1] != [-1] for product in staged.products):
        return False
    batch = step_shape[0]
    other_sizes = {size for shape in lifted_shapes for size in shape}
    other_sizes |= {size for shape, _ in staged.values.values() for size in shape[1:]}
    if batch in other_sizes or not all(stage.graph.is_of_any_batch for stage in staged.stages):
        return False
    return all(_is_resizable(call, batch) for view in _list_views(staged) for call in view.calls)


def resized(staged: StagedStep, old: int, new: int) -> StagedStep:
    """The step with the size of its first dimension changed from `old` to `new`. No other size may be `old`."""

    def shape(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(new if size == old else size for size in sizes)

    def call(original: Call) -> Call:
        target, args, kwargs = original
        if target not in _TO_SIZES:
            return original
        return target, (list(shape(args[0])), *args[1:]), kwargs

    def view(original: View) -> View:
        return replace(original, calls=tuple(map(call, original.calls)), shape=shape(original.shape))

    def part(original: Stage | Product) -> Stage | Product:
        if isinstance(original, Stage):
            return replace(
                original,
                shape=shape(original.shape),
                reads=tuple(map(view, original.reads)),
                writes=tuple(map(view, original.writes)),
            )
        return replace(
            original,
            args=tuple(view(a) if isinstance(a, View) else a for a in original.args),
            result=view(original.result),
            shape=shape(original.shape),
            factor_shapes=tuple(map(shape, original.factor_shapes)),
        )

    def term(original: Term) -> Term:
        return replace(
            original,
            values=tuple(map(view, original.values)),
            calls=tuple(_convert_call(c, view) for c in original.calls),
        )

    values = {port: (shape(sizes), dtype) for port, (sizes, dtype) in staged.values.items()}
    parts, terms = tuple(map(part, staged.parts)), tuple(map(term, staged.terms))
    return replace(staged, parts=parts, values=values, terms=terms)


def _convert_call(call: Call, view: Callable[[View], View]) -> Call:
    target, args, kwargs = call
    return target, tuple(view(a) if isinstance(a, View) else a for a in args), kwargs


def _list_views(staged: StagedStep) -> list[View]:
    results: list[View] = []
    for part in staged.parts:
        results += part.reads
        results += part.writes if isinstance(part, Stage) else (part.result,)
    for term in staged.terms:
        results += term.values
        results += (a for _, args, _ in term.calls for a in args if isinstance(a, View))
    return results


def _is_resizable(call: Call, batch: int) -> bool:
    """True if `resized` can replace the size `batch` in a call, or if the call does not contain this size."""
    target, args, kwargs = call
    if target in _TO_SIZES:
        return not kwargs
    numbers: list[Any] = [*args, *kwargs.values()]
    numbers += [n for a in numbers if isinstance(a, list | tuple) for n in a]
    return all(number != batch for number in numbers if isinstance(number, int))
