"""Everything here is private torch API. Seen working on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TORCH_FOLDER",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "decomposition_table",
    "lower",
    "record",
    "rounded",
    "set_stack_trace",
    "undisturbed",
]

Table = Mapping[Any, Callable[..., Any]]
TORCH_FOLDER = str(Path(torch.__file__).parent)


def set_stack_trace(trace: str) -> None:
    """Attaches `trace` to the nodes recorded from here on."""
    fx_traceback.set_stack_trace([trace])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Tracing that does not depend on what is switched on around it: modes, autocast, inference mode.

    Backward stays in this thread, where the dispatch modes are.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def rounded(value: float, dtype: torch.dtype) -> float:
    """A Python number, rounded to `dtype`; also while something is traced."""
    with _disable_current_modes():
        number: float = torch.tensor(value, dtype=dtype, device="cpu").item()
    return number


def record(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor], mode: FakeTensorMode, table: Table
) -> fx.GraphModule:
    """Records `function(*arguments)` as ATen ops, as they are called; those in `table` decomposed."""
    with mode, fx_traceback.preserve_node_meta():
        return make_fx(function, decomposition_table=table)(*arguments)


def lower(module: fx.GraphModule, arguments: Sequence[Tensor], mode: FakeTensorMode, table: Table) -> fx.GraphModule:
    """Re-traces `module` without mutation, decomposed down to prims; `table` goes before torch's."""

    def replay(*inputs: Tensor) -> Any:
        return fx.Interpreter(module).run(*inputs)

    full = {**decomposition_table, **table}
    functional = torch.func.functionalize(replay, remove="mutations")
    with mode, fx_traceback.preserve_node_meta(), torch.no_grad():
        return make_fx(functional, decomposition_table=full)(*arguments)
