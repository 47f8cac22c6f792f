"""Compiles the graph of one step with Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import fx

from flexsn_hop._torch_private._tracing import FakeTensorMode
from flexsn_hop.versions import expect, needed, private

_NO_CODE = "a compiled `flex_sn_scan` runs step by step, without Inductor's code for a step"

_PROPAGATION = "torch.fx.passes.fake_tensor_prop"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_SOURCES = "torch._dynamo.source"

expect("torch._inductor.compile_fx", ["compile_fx_inner"], _NO_CODE)
expect("torch._inductor.config", ["size_asserts", "nan_asserts"], _NO_CODE)
expect("torch._inductor.output_code", ["CompiledFxGraph.current_callable"], _NO_CODE)

# These modules are imported when a step is compiled, because they import sympy, which takes long.
expect(_PROPAGATION, ["FakeTensorProp"], _NO_CODE)
expect(
    _SYMBOLS, ["DimDynamic", "ShapeEnv", "ShapeEnv.create_symintnode", "ShapeEnv.create_unspecified_symbol"], _NO_CODE
)
expect(_SOURCES, ["ConstantSource"], _NO_CODE)

_reinterpret_tensor = private("torch._C", "_dynamo.guards._reinterpret_tensor", _NO_CODE, default=None)

StepCode = Callable[[list[Any]], Any]
"""Compiled code: a function that takes its arguments as a list, and empties the list."""

# Compiled steps do not check sizes or alignments, since all rows of a sequence have the layout of the first row.
# Compiled steps do not use CUDA graphs either, since a CUDA graph should record the whole scan.
_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "nan_asserts": False, "triton.cudagraphs": False}

ALIGNMENT = 16
"""Alignment in bytes. Compiled code for a GPU depends on whether addresses are multiples of this number."""


class RowsOf(Sequence[torch.Tensor]):
    """The rows of a sequence at these indices, as arguments of compiled steps. Rows share the memory of the sequence.

    Iteration creates one row at a time, in less time and memory than ``unbind``. The creation of a tensor takes as long
    as a small step.
    """

    def __init__(self, sequence: torch.Tensor, indices: range) -> None:
        self._sequence = sequence
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._sequence[self._indices[index]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        if _reinterpret_tensor is None:
            return map(self._sequence.__getitem__, self._indices)
        sequence, indices = self._sequence, self._indices
        row = sequence.stride(0)
        offsets = range(indices.start * row, indices.stop * row, indices.step * row)
        shapes = repeat(tuple(sequence.shape[1:])), repeat(sequence.stride()[1:])
        return map(_reinterpret_tensor, repeat(sequence), *shapes, offsets)


def fake_results(module: fx.GraphModule, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns fake tensors with the properties of a graph's results. The graph takes tensors like ``rows``."""
    mode = _make_fake_mode()
    fakes = [_make_fake(mode, row.shape, row, True) for row in rows]
    propagation = needed(_PROPAGATION, "FakeTensorProp", _NO_CODE)
    results: list[torch.Tensor] = list(propagation(module, mode).propagate_dont_convert_inputs(*fakes))
    return results


def compile_step(
    module: fx.GraphModule,
    sequences: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    aligned: Sequence[bool],
    longest: int,
) -> StepCode:
    """Compiles a graph of ATen operators with Inductor, for the memory layouts of ``sequences`` and ``rows``.

    The graph takes an index below ``longest``, sequences of at most ``longest`` rows, and tensors like ``rows``. The
    graph writes its results to arguments with ``copy_``, and returns no results. ``aligned`` has one entry for each
    sequence and each row, which is True if the address of the tensor is a multiple of ``ALIGNMENT``.
    """
    compile_fx_inner = needed("torch._inductor.compile_fx", "compile_fx_inner", _NO_CODE)
    config = needed("torch._inductor", "config", _NO_CODE)
    mode = _make_fake_mode()
    layouts = [((longest, *sequence.shape[1:]), sequence) for sequence in sequences]
    layouts += [(row.shape, row) for row in rows]
    fakes = [_make_fake(mode, *pair, is_aligned) for pair, is_aligned in zip(layouts, aligned, strict=True)]
    with config.patch({name: value for name, value in _OPTIONS.items() if _has_setting(config, name)}), torch.no_grad():
        code = compile_fx_inner(module, [_make_index(mode.shape_env, longest), *fakes])
    result: StepCode = code.current_callable
    return result


def _make_index(shape_env: Any, longest: int) -> Any:
    """Returns a symbolic index below ``longest``. Compiled code is valid for all values of the index."""
    dynamic = needed(_SYMBOLS, "DimDynamic", _NO_CODE).DYNAMIC
    source = needed(_SOURCES, "ConstantSource", _NO_CODE)("row")
    hint = longest // 2
    return shape_env.create_symintnode(shape_env.create_unspecified_symbol(hint, source, dynamic), hint=hint)


def _make_fake_mode() -> Any:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=needed(_SYMBOLS, "ShapeEnv", _NO_CODE)())


def _make_fake(mode: Any, shape: Sequence[int], like: torch.Tensor, is_aligned: bool) -> torch.Tensor:
    """Returns a fake tensor of this shape with the strides, dtype and device of ``like``.

    A tensor that is not aligned begins at the second element of its memory.
    """
    with mode:
        if is_aligned:
            return torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)
        extent = 2 + sum((size - 1) * stride for size, stride in zip(shape, like.stride(), strict=True))
        memory = torch.empty(extent, dtype=like.dtype, device=like.device)
        return memory.as_strided(shape, like.stride(), 1)


def _has_setting(config: Any, name: str) -> bool:
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    return hasattr(config, last)
