"""Functions that cut dimensions of their arguments. Their kernels depend on the arguments' shapes.

Such a function cuts a dimension into pieces and joins pieces (halves of a gate, rotary embeddings, channels, cells), or
aligns a tensor with a dimension other than the last one, such as a weight for each channel. Its kernel works on the
elements of one piece. Each piece of an argument or a result is an operand with its own strides. Nothing is copied, and
nothing is read twice. See `flexsn_graph.cells`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._calls import Structure, put_together
from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._host_numbers import Notes, noting
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._words import in_words_of
from flexsn_codegen.source._numerics import Numerics
from flexsn_graph import StatefulCoreError, Substituted, TorchError, cells_effects
from flexsn_graph.reads import Reads

# Sizes that are divisible into a few equal pieces, or into pieces of an even size.
_CUT_SIZES = (2, 3, 4, 6, 8, 12, 24, 64)


def cut_of(
    fn: Callable[..., Any],
    name: str,
    numerics: Numerics,
    structure: Structure,
    examples: Sequence[Tensor],
    numbers: Sequence[Any],
    *,
    must_cut: bool = True,
) -> Kernel:
    """The kernel of a function that cuts dimensions, for calls with this structure.

    Args:
        must_cut: see `flexsn_graph.trace_cells`.
        examples: the tensors of a call, of which only shapes, dtypes and devices matter.
        numbers: the numbers of a call.
    """
    captured = Captured(fn, name)

    def run(*values: Tensor) -> Any:
        return _call(fn, structure, values, Notes(numbers))

    tensors: tuple[Tensor, ...] = ()
    with in_words_of(name), captured.reads.restored():
        try:
            tensors = cells_effects(run, examples, captured.reads).captured
            with captured.reads.preserved():
                cells_effects(run, examples)
        except StatefulCoreError:
            raise
        except Exception:
            pass  # the trace of the function will raise the error
        captured.keep(tensors)
    return _make_cut_kernel(fn, name, numerics, structure, captured, must_cut=must_cut)


def cut_for_graphs(
    fn: Callable[..., Any],
    name: str,
    numerics: Numerics,
    structure: Structure,
    kinds: Sequence[tuple[torch.dtype, int]],
    numbers: Sequence[Any],
    eager_kernel: Kernel | None,
    otherwise: Exception,
) -> Kernel:
    """The kernel of a function that cuts dimensions of unknown sizes, for calls with this structure.

    Args:
        kinds: dtype and number of dimensions of each tensor of a call.
        eager_kernel: the kernel of eager mode, or `None` if the function was not called in eager mode.
        otherwise: the error to raise if the function does not cut anything.
    """
    if eager_kernel is not None and eager_kernel.captured.fetch() is not None:
        captured = eager_kernel.captured
    else:
        captured = Captured(fn, name)
        captured.keep(_find_captured(fn, structure, kinds, numbers, captured.reads))
    must_cut = not isinstance(otherwise, TorchError)
    return _make_cut_kernel(fn, name, numerics, structure, captured, must_cut=must_cut, otherwise=otherwise)


def _make_cut_kernel(
    fn: Callable[..., Any],
    name: str,
    numerics: Numerics,
    structure: Structure,
    captured: Captured,
    *,
    must_cut: bool,
    otherwise: Exception | None = None,
) -> Kernel:
    captured_tensors = captured.tensors
    has_captured = bool(captured_tensors)

    def bind(notes: Notes) -> Callable[..., Any]:
        def function(*values: Tensor) -> Any:
            count = len(values) - len(captured_tensors)
            stand_ins = dict(zip(map(id, captured_tensors), values[count:], strict=True))
            with captured.reads.preserved(), Substituted(stand_ins) if stand_ins else ExitStack():
                return _call(fn, structure, values[:count], notes)

        # A user's function that needs no adapter keeps its name, so that error messages name the function and line.
        plain_call = not notes.numbers and structure == ("call", (("tensor",),) * len(structure[1]), ())
        if not plain_call or has_captured:
            return function

        @functools.wraps(fn, updated=())
        def plain(*values: Tensor) -> Any:
            with captured.reads.preserved():
                return fn(*values)

        return plain

    return Kernel(name, numerics, bind, captured=captured, cuts=True, must_cut=must_cut, otherwise=otherwise)


def _find_captured(
    fn: Callable[..., Any],
    structure: Structure,
    kinds: Sequence[tuple[torch.dtype, int]],
    numbers: Sequence[Any],
    reads: Reads,
) -> tuple[Tensor, ...]:
    """The tensors that a function captures, found by running the function on sizes that it may be able to cut.

    Args:
        reads: records the values that the function reads in these runs. The trace of the function may add more values.
    """
    results: dict[int, Tensor] = {}

    def run(*values: Tensor) -> Any:
        return _call(fn, structure, values, Notes(numbers))

    sizes = [1, *_CUT_SIZES]
    for size in sizes:
        examples = [torch.empty((size,) * dims, dtype=dtype, device="meta") for dtype, dims in kinds]
        num_captured = len(results)
        with contextlib.suppress(Exception):
            return cells_effects(run, examples, reads, results).captured
        if len(results) > num_captured:
            # Sizes of dimensions that may match the captured tensors, either whole or after a cut into a few pieces.
            captured_sizes = sorted({n for tensor in results.values() for n in tensor.shape})
            sizes += [multiple * n for n in captured_sizes for multiple in (1, 2, 3, 4) if multiple * n not in sizes][
                :64
            ]
    return tuple(results.values())


def _call(fn: Callable[..., Any], structure: Structure, values: Sequence[Tensor], notes: Notes) -> Any:
    args, kwargs = put_together(structure, values, notes.arguments())
    with noting() if notes.numbers else ExitStack():
        return fn(*args, **kwargs)
