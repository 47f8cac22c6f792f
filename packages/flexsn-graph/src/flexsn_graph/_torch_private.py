"""Everything here is private torch API. Each name is probed when this is imported."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from flexsn_graph._ops import VIEW_OPS
from flexsn_graph._torch_private_ops import OpOverload
from flexsn_graph.versions import expect, needed, private, say_if_newer

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "autocast_now",
    "constant_value",
    "custom_op_body",
    "fake_like",
    "gradients",
    "lower",
    "op_location_key",
    "record",
    "set_stack_trace",
    "split_joint",
    "undisturbed",
    "unrecorded",
    "without_hooks",
]

say_if_newer("torch")

_NO_TRACE = "step functions cannot be traced, and nothing can be compiled"
_NO_VJP = "gradients cannot be traced: kernels infer, but do not train"
_NO_SPLIT = "`generate_forward_and_backward_graph` cannot split a joint graph"

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = private("torch._subclasses.fake_tensor", "FakeTensor", _NO_TRACE)
    FakeTensorMode = private("torch._subclasses.fake_tensor", "FakeTensorMode", _NO_TRACE)
    TorchDispatchMode = private("torch.utils._python_dispatch", "TorchDispatchMode", _NO_TRACE)
make_fx = private("torch.fx.experimental.proxy_tensor", "make_fx", _NO_TRACE, takes=["decomposition_table"])
disable_proxy_modes_tracing = private("torch.fx.experimental.proxy_tensor", "disable_proxy_modes_tracing", _NO_TRACE)
_disable_current_modes = private("torch.utils._python_dispatch", "_disable_current_modes", _NO_TRACE)
_current_autograd_node = private("torch._C", "_current_autograd_node", _NO_TRACE)
_next_sequence_nr = private("torch._C", "_autograd._get_sequence_nr", _NO_TRACE)
_preserve_node_meta = private("torch.fx.traceback", "preserve_node_meta", _NO_TRACE)
_fx_set_stack_trace = private("torch.fx.traceback", "set_stack_trace", _NO_TRACE)
decomposition_table = private("torch._decomp", "decomposition_table", _NO_TRACE, default={})
_sources = private("torch.fx.graph_module", "_loader.eval_cache", "torch keeps the source of every trace", default={})
_engine_run_backward = private("torch.autograd.graph", "_engine_run_backward", _NO_VJP)
core_aten_decompositions = private("torch._decomp", "core_aten_decompositions", _NO_SPLIT)
expect("torch._functorch.partitioners", ["min_cut_rematerialization_partition"], _NO_SPLIT)  # slow to import
_custom_ops = private(
    "torch._library.custom_ops", "OPDEFS", "`torch.library.custom_op`s are refused in step functions", default={}
)
# Scripted functions run as written while they are traced.
_unoptimized: Callable[[bool], Any] = private(
    "torch.jit", "optimized_execution", "scripted steps may be refused", default=lambda optimized: nullcontext()
)
# Attributes, which are read where they are needed.
private("torch._C", "_functions.AccumulateGrad._sequence_nr", _NO_TRACE)
private("torch", "Tensor._backward_hooks", _NO_VJP)
private("torch.fx", "Node._rename", _NO_SPLIT)
expect(
    "torch._library.custom_ops",
    ["CustomOpDef._init_fn", "CustomOpDef._backend_fns"],
    "`torch.library.custom_op`s are refused in step functions",
)
expect(
    "torch._dynamo.config",
    ["error_on_nested_fx_trace"],
    "functions that torch.compile has compiled are refused in step functions",
)

_AUTOCAST_DEVICES = ("cpu", "cuda")
_ONE_AT_A_TIME = threading.RLock()
# The autograd nodes in whose backward formulas a trace has been begun, the innermost last.
_around: list[Any] = []


def fake_like(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """A leaf stand-in for `tensor`: same shape, strides, dtype and device; no data, no gradient.

    On the CPU when the tensor's device is not there (meta, or a GPU on a machine without one): autograd ends
    the process when it meets a device that torch was not built for, fake or not.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    device = tensor.device if tensor.device.type in here else torch.device("cpu")
    with _disable_current_modes(), mode, torch.no_grad():
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
    _fx_set_stack_trace([trace])


def op_location_key() -> tuple[bool, int]:
    """`(in backward, autograd sequence number)` of the op that is being dispatched.

    An op and the backward formula that autograd runs for it have the same number.
    """
    node = _current_autograd_node()
    if node is not None and node is not _around[-1]:
        return True, node._sequence_nr()
    # The op's own node has been created already, and took the number before the next one.
    return False, cast(int, _next_sequence_nr()) - 1


def autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    """Devices for which `torch.autocast` is on, and to which dtype; inside `undisturbed`, the core has done it."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )


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
        stack.enter_context(_unoptimized(False))
        for device in _AUTOCAST_DEVICES:
            # Nor a cache of what it converts, where stand-ins for the user's parameters would be found afterwards.
            stack.enter_context(torch.autocast(device, enabled=False, cache_enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it is slow to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            config = torch._dynamo.config
            if hasattr(config, "error_on_nested_fx_trace"):
                stack.enter_context(config.patch(error_on_nested_fx_trace=False))
        _around.append(_current_autograd_node())
        try:
            yield
        finally:
            _around.pop()


def gradients(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], *, keep_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, under which a function mode would not see what backward formulas call.

    In this thread, where what they read is seen: autograd would have a thread of its own for a GPU.
    """
    with torch.autograd.set_multithreading_enabled(False):
        found: tuple[Tensor | None, ...] = _engine_run_backward(
            tuple(roots), tuple(cotangents), keep_graph, False, tuple(inputs), True, accumulate_grad=False
        )
    return found


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


def custom_op_body(op: OpOverload) -> Callable[..., Any] | None:
    """The Python function of a `torch.library.custom_op` that is the same on all devices."""
    definition = _custom_ops.get(op.name())
    if op.namespace in {"aten", "prims", "rngprims"} or definition is None:
        return None
    if set(getattr(definition, "_backend_fns", ())) != {None}:
        return None
    body: Callable[..., Any] | None = getattr(definition, "_init_fn", None)
    return body


@contextmanager
def _keeping_locations() -> Iterator[None]:
    with _preserve_node_meta():
        yield


def record(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[FakeTensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Records `function(*arguments)` as ATen ops, as they are called."""
    with mode, _keeping_locations():
        graph: fx.GraphModule = make_fx(function, decomposition_table=_AS_EAGER)(*arguments)
    return _without_source(graph)


def _without_source(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, whose Python source torch does not keep: it would keep that of every trace for good."""
    name = type(module).forward.__code__.co_filename
    _sources.pop(name, None)
    linecache.cache.pop(name, None)
    return module


@contextmanager
def unrecorded() -> Iterator[None]:
    """What is called in here while `record` runs leaves no nodes."""
    with disable_proxy_modes_tracing():
        yield


def lower(
    module: fx.GraphModule,
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Re-traces `module` without mutation, decomposed (by default: down to prims and views)."""

    def replay(*inputs: Tensor) -> Any:
        return fx.Interpreter(module).run(*inputs)

    table = {**(_TO_PRIMS if decompositions is None else decompositions), **_DECOMPOSITIONS}
    for view in VIEW_OPS:
        table.pop(view, None)
    arguments = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    functional = torch.func.functionalize(replay, remove="mutations")
    with mode, _keeping_locations(), torch.no_grad():
        graph: fx.GraphModule = make_fx(functional, decomposition_table=table)(*arguments)
    return _without_source(graph)


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


def _in_common_dtype(decomposition: Callable[..., Any], *values: Any) -> Any:
    """Numbers and tensors without dimensions are rounded to the others' half dtype first, as eager mode does.

    So that a bfloat16 value, 0.30078125, is not above 0.3. Torch's table compares in float32.
    """
    dtype = torch.result_type(*values)
    if dtype in _HALF_DTYPES:
        values = tuple(_as_half(value, dtype) for value in values)
    return decomposition(*values)


def _as_half(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype)
    if not isinstance(value, float):
        return value
    with _disable_current_modes():
        return torch.tensor(value, dtype=dtype, device="cpu").item()


def _pow_by_number(x: Tensor, exponent: float) -> Any:
    """Two powers that eager mode writes out, and rounds half values in between (not float16 on the CPU)."""
    if x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and x.device.type != "cpu"):
        if exponent == 3.0:
            return x * x * x
        if exponent == -2.0:
            return (x * x).reciprocal()
    return _in_common_dtype(decomposition_table[torch.ops.aten.pow.Tensor_Scalar], x, exponent)


def _half_numbers() -> dict[Any, Callable[..., Any]]:
    """What torch's table computes in float32 with numbers that eager mode rounds to the tensor's half dtype."""
    aten = torch.ops.aten
    ops = [getattr(getattr(aten, n), k) for n in ("eq", "ne", "lt", "le", "gt", "ge") for k in ("Scalar", "Tensor")]
    ops += [aten.fmod.Scalar, aten.fmod.Tensor, aten.pow.Scalar, aten.pow.Tensor_Tensor]
    ops += [aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.remainder.Tensor]
    known = {op: decomposition_table[op] for op in ops if op in decomposition_table}
    rounding = {op: functools.partial(_in_common_dtype, decomposition) for op, decomposition in known.items()}
    return {**rounding, aten.pow.Tensor_Scalar: _pow_by_number}


_HALF_DTYPES = {torch.float16, torch.bfloat16}
_TO_PRIMS: dict[Any, Callable[..., Any]] = {**decomposition_table, **_half_numbers()}

# Decomposed while it is recorded: `functionalize` has another decomposition of its own.
_AS_EAGER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
}

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
    partition = needed(
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition",
        _NO_SPLIT,
        takes=["num_fwd_outputs"],
    )
    functional = lower(joint, mode, core_aten_decompositions())
    arguments = [n.meta["val"] for n in functional.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(n for n in functional.graph.nodes if n.op == "placeholder"):
        # The partitioner knows the roles by these names.
        role = f"primals_{i}" if i < num_primals else f"tangents_{i - num_primals}"
        node._rename(role)
        node.target = node.name
    functional.recompile()
    with mode:
        forward, backward = partition(
            functional, arguments, num_fwd_outputs=num_results
        )
    return forward, backward
