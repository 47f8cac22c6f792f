"""Everything here is private torch API. Seen working on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flexsn_graph._ops import VIEW_OPS

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "constant_value",
    "custom_op_body",
    "fake_like",
    "lower",
    "op_location_key",
    "record",
    "set_stack_trace",
    "split_joint",
    "undisturbed",
    "without_hooks",
]


_ONE_AT_A_TIME = threading.RLock()


def fake_like(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """A leaf stand-in for `tensor`: same shape, strides, dtype and device; no data, no gradient.

    On the CPU when the tensor's device is not there (meta, or a GPU on a machine without one): autograd ends
    the process when it meets a device that torch was not built for, fake or not.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    device = tensor.device if tensor.device.type in here else torch.device("cpu")
    with mode, torch.no_grad():
        # Not `mode.from_tensor`: it keeps `requires_grad`, and refuses another mode's fake tensor.
        return cast(
            FakeTensor,
            torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            ),
        )


def constant_value(tensor: Tensor) -> str:
    """What a tensor that was made on the spot holds, also while tracing."""
    with _disable_current_modes():
        return repr(tensor.tolist())


def set_stack_trace(trace: str) -> None:
    """Attaches `trace` to the nodes recorded from here on."""
    fx_traceback.set_stack_trace([trace])


def op_location_key() -> tuple[bool, int]:
    """`(in backward, autograd sequence number)` of the op that is being dispatched.

    An op and the backward formula that autograd runs for it have the same number.
    """
    node = torch._C._current_autograd_node()
    if node is not None:
        return True, node._sequence_nr()
    # The op's own node has been created already, and took the number before the next one.
    return False, torch.autograd._get_sequence_nr() - 1


@contextmanager
def undisturbed() -> Iterator[None]:
    """Tracing that does not depend on what is switched on around it, and leaves it as it was.

    No autocast, no other tracer or fake mode, no inference mode, no anomaly detection (it reads values),
    no compilation of functions that the core calls, scripted ones run as written; backward in this
    thread, where the dispatch modes are. One trace at a time: FX patches Python globals while it traces.
    """
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it is slow to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        yield


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Turns the tensors' gradient hooks off: they are for the real gradient, and run on it later."""
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    try:
        for live, _ in hooks:
            live.clear()
        yield
    finally:
        for live, kept in hooks:
            live.update(kept)


def custom_op_body(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The Python function of a `torch.library.custom_op` that is the same on all devices."""
    definition = OPDEFS.get(op.name())
    if op.namespace in {"aten", "prims", "rngprims"} or definition is None:
        return None
    return definition._init_fn if set(definition._backend_fns) == {None} else None


@contextmanager
def _keeping_locations() -> Iterator[None]:
    with fx_traceback.preserve_node_meta():
        yield


def record(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[FakeTensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Records `function(*arguments)` as ATen ops, as they are called."""
    with mode, _keeping_locations():
        return make_fx(function)(*arguments)


def lower(
    module: fx.GraphModule,
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Re-traces `module` without mutation, decomposed (by default: down to prims and views)."""

    def replay(*inputs: Tensor) -> Any:
        return fx.Interpreter(module).run(*inputs)

    table = {**(decomposition_table if decompositions is None else decompositions), **_DECOMPOSITIONS}
    for view in VIEW_OPS:
        table.pop(view, None)
    arguments = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    functional = torch.func.functionalize(replay, remove="mutations")
    with mode, _keeping_locations(), torch.no_grad():
        return make_fx(functional, decomposition_table=table)(*arguments)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(target.dtype).expand(target.shape)


def _index_put(
    target: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """`target[mask] = value`, the usual way to write a reset; other indices are not pointwise."""
    mask = indices[0]
    if (
        len(indices) == 1
        and mask is not None
        and mask.dtype == torch.bool
        and mask.shape == target.shape
        and values.numel() == 1
        and not accumulate
    ):
        return torch.where(mask, values.reshape(()), target)
    return NotImplemented


# What torch's tables leave, because its own backends have kernels for it.
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.index_put.default: _index_put,
    torch.ops.aten.__lshift__.Scalar: torch.bitwise_left_shift,
    torch.ops.aten.__lshift__.Tensor: torch.bitwise_left_shift,
    torch.ops.aten.__rshift__.Scalar: torch.bitwise_right_shift,
    torch.ops.aten.__rshift__.Tensor: torch.bitwise_right_shift,
}


def split_joint(
    joint: fx.GraphModule, num_primals: int, num_results: int, mode: FakeTensorMode
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits `[*primals, *cotangents] -> [*results, *gradients]` where the fewest bytes are kept.

    On core ATen ops, not prims: on prims the minimal cut keeps about half as much again.
    """
    functional = lower(joint, mode, core_aten_decompositions())
    arguments = [n.meta["val"] for n in functional.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(n for n in functional.graph.nodes if n.op == "placeholder"):
        # The partitioner knows the roles by these names.
        role = f"primals_{i}" if i < num_primals else f"tangents_{i - num_primals}"
        node._rename(role)
        node.target = node.name
    functional.recompile()
    with mode:
        forward, backward = min_cut_rematerialization_partition(
            functional, arguments, num_fwd_outputs=num_results
        )
    return forward, backward
