"""Calls of functions that are kernels for arguments of their own shapes alone.

They cut their arguments into pieces, or lay a tensor along a dimension in the middle, as a weight for each channel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, TraceError
from flexsn_codegen.functions._autograd import WithGradients
from flexsn_codegen.functions._calls import Parts, Structure, put_together
from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._checks import check_gradients, check_tensors, is_followed, wants_gradients
from flexsn_codegen.functions._cut import CutFunction, Function
from flexsn_codegen.functions._host_numbers import Notes, noting
from flexsn_codegen.functions._kernels import Kernels
from flexsn_graph import (
    DataDependentError,
    MutationError,
    NothingCutError,
    StatefulCoreError,
    Substituted,
    TorchError,
    cells_effects,
)
from flexsn_graph.reads import Reads

# Functions that cut are kept for as many kinds of calls.
_MAX_CUTS = 256
# Sizes that are cut into a few equal pieces, or into pieces of an even size.
_CUT_SIZES = (2, 3, 4, 6, 8, 12, 24, 64)


class Pieces:
    """A function in those kinds of calls in which it cuts."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._known: dict[tuple[Any, ...], CutFunction] = {}

    def known(self, structure: Structure, parts: Parts) -> tuple[CutFunction, tuple[Tensor, ...]] | None:
        """The function for a call, if it is known to cut there, and the captured tensors as they are now."""
        found = self._known.get(_kind(structure, parts)) if self._known else None
        captured = None if found is None else found.captured.fetch()
        return None if found is None or captured is None else (found, captured)

    def made(self, structure: Structure, parts: Parts, error: Exception) -> tuple[CutFunction, tuple[Tensor, ...]]:
        """The function as one that cuts its arguments, and the captured tensors.

        Args:
            error: why it is no kernel on whole tensors.

        Raises:
            The reason why it is a kernel of neither kind.
        """
        grad = torch.is_grad_enabled()
        try:
            cut = cut_of(self._kernels, structure, parts.tensors, parts.numbers)
            captured = tuple(cut.captured.tensors)
            tensors = [*parts.tensors, *captured]
            check_tensors(self._kernels.name, tensors)
            # What torch refuses for the tracer's shapes may be fine for the arguments' own.
            wanted = tuple(grad and t.requires_grad for t in tensors)
            cut.trace(tensors, parts.numbers, wanted, must_cut=not isinstance(error, TorchError))
        except NothingCutError:
            raise error from None
        except (TorchError, MutationError) as second:
            if isinstance(error, ArgumentError) or isinstance(second, MutationError):
                raise error from second
            raise second from None  # it speaks of the arguments' own shapes
        except TraceError:
            if isinstance(error, DataDependentError):  # a captured tensor, which is no constant either
                raise error from None
            raise
        if len(self._known) >= _MAX_CUTS:
            self._known.clear()
        self._known[_kind(structure, parts)] = cut
        self._kernels.known_cuts[structure] = cut
        return cut, captured

    def run(self, cut: CutFunction, captured: Sequence[Tensor], parts: Parts) -> Any:
        """Calls it.

        Raises:
            NothingCutError: with these numbers, it cuts nothing.
        """
        tensors, numbers = [*parts.tensors, *captured], parts.numbers
        if captured:
            check_tensors(self._kernels.name, tensors)
        if wants_gradients(tensors):
            check_gradients(self._kernels.name, writes=False, autograd=self._kernels.autograd)
        if is_followed(tensors):
            results = WithGradients.apply(cut, numbers, *tensors)
        else:
            results = cut.run(tensors, numbers, (False,) * len(tensors))[0]
        return results[0] if cut.single else tuple(results)


def cut_of(kernels: Kernels, structure: Structure, examples: Sequence[Tensor], numbers: Sequence[Any]) -> CutFunction:
    """A function, called in such a structure, as one that cuts.

    Args:
        examples: the tensors of a call; shapes, dtypes and devices are looked at.
        numbers: those of a call.
    """
    captured = Captured(kernels.fn, kernels.name)

    def run(*values: Tensor) -> Any:
        return _called(kernels, structure, values, Notes(numbers))

    tensors: tuple[Tensor, ...] = ()
    with captured.reads.restored():
        try:
            tensors = cells_effects(run, examples, captured.reads).captured
            with captured.reads.preserved():
                cells_effects(run, examples)
        except StatefulCoreError:
            raise
        except Exception:
            pass  # its trace says why
        captured.keep(tensors)
    return _cut_function(kernels, structure, captured)


def cut_for_graphs(
    kernels: Kernels,
    structure: Structure,
    kinds: Sequence[tuple[torch.dtype, int]],
    numbers: Sequence[Any],
    otherwise: Exception,
) -> CutFunction:
    """A function, called in such a structure, as one that cuts arguments of which no sizes are known.

    Args:
        otherwise: raised where it cuts nothing.
    """
    known = kernels.known_cuts.get(structure)
    if known is not None and known.captured.fetch() is not None:
        captured = known.captured
    else:
        captured = Captured(kernels.fn, kernels.name)
        captured.keep(_captured_at_some_size(kernels, structure, kinds, numbers, captured.reads))
    return _cut_function(kernels, structure, captured, otherwise)


def _cut_function(
    kernels: Kernels, structure: Structure, captured: Captured, otherwise: Exception | None = None
) -> CutFunction:
    now = captured.tensors
    has_captured = bool(now)

    def bind(notes: Notes) -> Function:
        def function(*values: Tensor) -> Any:
            count = len(values) - len(now)
            stand_ins = dict(zip(map(id, now), values[count:], strict=True))
            with captured.reads.preserved(), Substituted(stand_ins) if stand_ins else ExitStack():
                return _called(kernels, structure, values[:count], notes)

        # What is called as it is keeps its own name and lines.
        plain_call = not notes.numbers and structure == ("call", (("tensor",),) * len(structure[1]), ())
        if not plain_call or has_captured:
            return function

        @functools.wraps(kernels.fn, updated=())
        def plain(*values: Tensor) -> Any:
            with captured.reads.preserved():
                return kernels.fn(*values)

        return plain

    cut = CutFunction(bind, kernels.name, kernels.numerics, captured, otherwise=otherwise)
    cut.must_cut = not isinstance(otherwise, TorchError)
    return cut


def _captured_at_some_size(
    kernels: Kernels,
    structure: Structure,
    kinds: Sequence[tuple[torch.dtype, int]],
    numbers: Sequence[Any],
    reads: Reads,
) -> tuple[Tensor, ...]:
    """The tensors that a function captures, found by running it at sizes that it may cut.

    Args:
        reads: records what else it reads, as far as it comes; its trace records the rest.
    """
    found: dict[int, Tensor] = {}

    def run(*values: Tensor) -> Any:
        return _called(kernels, structure, values, Notes(numbers))

    sizes = [1, *_CUT_SIZES]
    for size in sizes:
        examples = [torch.empty((size,) * dims, dtype=dtype, device="meta") for dtype, dims in kinds]
        before = len(found)
        with contextlib.suppress(Exception):
            return cells_effects(run, examples, reads, found).captured
        if len(found) > before:
            # Sizes that may fit to what it captures, whole or cut into a few pieces.
            own = sorted({n for tensor in found.values() for n in tensor.shape})
            sizes += [many * n for n in own for many in (1, 2, 3, 4) if many * n not in sizes][:64]
    return tuple(found.values())


def _called(kernels: Kernels, structure: Structure, values: Sequence[Tensor], notes: Notes) -> Any:
    args, kwargs = put_together(structure, values, notes.arguments())
    with noting() if notes.numbers else ExitStack():
        return kernels.fn(*args, **kwargs)


def _kind(structure: Structure, parts: Parts) -> tuple[Any, ...]:
    """What decides whether a function is a kernel on pieces."""
    return (structure, *[(t.dtype, t.dim(), t.device.type) for t in parts.tensors])
