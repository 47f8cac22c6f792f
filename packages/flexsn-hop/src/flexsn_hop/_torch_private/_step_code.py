"""Inductor's code for the graph of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from flexsn_hop._torch_private._tracing import FakeTensorMode
from flexsn_hop.versions import expect, needed

_NO_CODE = "a compiled `flex_sn_scan` runs step by step, without Inductor's code for a step"

_PROPAGATION = "torch.fx.passes.fake_tensor_prop"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"

expect("torch._inductor.compile_fx", ["compile_fx_inner"], _NO_CODE)
expect("torch._inductor.config", ["size_asserts", "nan_asserts"], _NO_CODE)
expect("torch._inductor.output_code", ["CompiledFxGraph.current_callable"], _NO_CODE)

# Imported where a step is compiled: they import sympy, which takes longer than all else here.
expect(_PROPAGATION, ["FakeTensorProp"], _NO_CODE)
expect(_SYMBOLS, ["ShapeEnv"], _NO_CODE)

StepCode = Callable[[list[Any]], Any]
"""Takes its arguments as a list, and empties that."""

# Rows of a sequence have the layout of the first one: a step has nothing to check. A graph of kernels is made of
# the whole scan, where one is used.
_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "nan_asserts": False, "triton.cudagraphs": False}

ALIGNMENT = 16
"""Bytes; code for a GPU depends on whether addresses are multiples."""


def fake_results(module: fx.GraphModule, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors like the results of a graph that takes tensors like ``rows``."""
    mode = _fake_mode()
    fakes = [_likeness(mode, row, True) for row in rows]
    propagation = needed(_PROPAGATION, "FakeTensorProp", _NO_CODE)
    results: list[torch.Tensor] = list(propagation(module, mode).propagate_dont_convert_inputs(*fakes))
    return results


def compile_step(module: fx.GraphModule, rows: Sequence[torch.Tensor], aligned: Sequence[bool]) -> StepCode:
    """Inductor's code for a graph of ATen operators, for tensors that lie in memory as ``rows`` do.

    The graph writes its results into arguments with ``copy_``, and returns nothing. ``aligned`` has True for
    each of ``rows`` whose address is a multiple of ``ALIGNMENT``.
    """
    compile_fx_inner = needed("torch._inductor.compile_fx", "compile_fx_inner", _NO_CODE)
    config = needed("torch._inductor", "config", _NO_CODE)
    mode = _fake_mode()
    fakes = [_likeness(mode, *pair) for pair in zip(rows, aligned, strict=True)]
    with config.patch({name: value for name, value in _OPTIONS.items() if _has(config, name)}), torch.no_grad():
        code = compile_fx_inner(module, fakes)
    found: StepCode = code.current_callable
    return found


def _fake_mode() -> Any:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=needed(_SYMBOLS, "ShapeEnv", _NO_CODE)())


def _likeness(mode: Any, row: torch.Tensor, is_aligned: bool) -> torch.Tensor:
    with mode:
        if is_aligned:
            return torch.empty_strided(row.shape, row.stride(), dtype=row.dtype, device=row.device)
        extent = 2 + sum((size - 1) * stride for size, stride in zip(row.shape, row.stride(), strict=True))
        memory = torch.empty(extent, dtype=row.dtype, device=row.device)
        return memory.as_strided(row.shape, row.stride(), 1)


def _has(config: Any, name: str) -> bool:
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    return hasattr(config, last)
