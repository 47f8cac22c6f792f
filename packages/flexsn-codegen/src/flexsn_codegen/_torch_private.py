"""Everything here is private torch API. Seen working on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    "lower",
    "record",
    "set_stack_trace",
    "undisturbed",
]

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


def record(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Records `function(*arguments)` as ATen ops, as they are called."""
    with mode, fx_traceback.preserve_node_meta():
        return make_fx(function, decomposition_table=_DECOMPOSITIONS)(*arguments)


def lower(module: fx.GraphModule, arguments: Sequence[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Re-traces `module` without mutation, decomposed down to prims."""

    def replay(*inputs: Tensor) -> Any:
        return fx.Interpreter(module).run(*inputs)

    table = {**decomposition_table, **_DECOMPOSITIONS}
    functional = torch.func.functionalize(replay, remove="mutations")
    with mode, fx_traceback.preserve_node_meta(), torch.no_grad():
        return make_fx(functional, decomposition_table=table)(*arguments)


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    """As eager: half values are rounded once, at the end; torch's table rounds them after each op."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    if not wide.is_floating_point():
        wide = wide.to(torch.get_default_dtype())
    if eps is not None:
        wide = wide.clamp(eps, 1.0 - eps)
    return torch.log(wide / (1.0 - wide)).to(x.dtype if x.is_floating_point() else wide.dtype)


def _bce_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """As eager, also for infinite `x`, where torch's table gives NaN."""
    log_sigmoid = torch.nn.functional.logsigmoid(x)
    if pos_weight is not None:
        log_sigmoid = log_sigmoid * ((pos_weight - 1.0) * target + 1.0)
    loss = (1.0 - target) * x - log_sigmoid
    if weight is not None:
        loss = loss * weight
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


# What torch's own table leaves, or does further from eager mode.
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.__lshift__.Scalar: torch.bitwise_left_shift,
    torch.ops.aten.__lshift__.Tensor: torch.bitwise_left_shift,
    torch.ops.aten.__rshift__.Scalar: torch.bitwise_right_shift,
    torch.ops.aten.__rshift__.Tensor: torch.bitwise_right_shift,
    torch.ops.aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    torch.ops.aten.logit.default: _logit,
}
