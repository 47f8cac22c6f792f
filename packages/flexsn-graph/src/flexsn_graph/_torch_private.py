"""Private names of torch that flexsn-graph uses. Importing this module checks that each of them exists."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from flexsn_graph._torch_private_ops import OpOverload
from flexsn_graph._trace_lock import TRACE_LOCK
from flexsn_graph.versions import expect, needed, private, warn_if_newer

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "autocast_now",
    "constant_value",
    "core_aten_decompositions",
    "custom_op_body",
    "decomposition_table",
    "fake_like",
    "forget_fake_results",
    "gradients",
    "is_stand_in",
    "min_cut_partitioner",
    "op_location_key",
    "reachable_nodes",
    "record",
    "recording_nodes",
    "rounded",
    "set_stack_trace",
    "trace_again",
    "undisturbed",
    "unrecorded",
    "without_hooks",
]

warn_if_newer("torch")

_NO_TRACE = "step functions cannot be traced, and nothing can be compiled"
_NO_VJP = "gradients cannot be traced: kernels infer, but do not train"
_NO_SPLIT = "`generate_forward_and_backward_graph` cannot split a joint graph"

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    DataDependentOutputException = private("torch._subclasses.fake_tensor", "DataDependentOutputException", _NO_TRACE)
    FakeTensor = private("torch._subclasses.fake_tensor", "FakeTensor", _NO_TRACE)
    FakeTensorMode = private("torch._subclasses.fake_tensor", "FakeTensorMode", _NO_TRACE)
    TorchDispatchMode = private("torch.utils._python_dispatch", "TorchDispatchMode", _NO_TRACE)
make_fx = private("torch.fx.experimental.proxy_tensor", "make_fx", _NO_TRACE, takes=["decomposition_table"])
disable_proxy_modes_tracing = private("torch.fx.experimental.proxy_tensor", "disable_proxy_modes_tracing", _NO_TRACE)
_disable_current_modes = private("torch.utils._python_dispatch", "_disable_current_modes", _NO_TRACE)
_without_torch_functions = private("torch._C", "DisableTorchFunction", _NO_TRACE)
_current_autograd_node = private("torch._C", "_current_autograd_node", _NO_TRACE)
_is_wrapped = private("torch._C", "_functorch.is_functorch_wrapped_tensor", _NO_TRACE)
_next_sequence_nr = private("torch._C", "_autograd._get_sequence_nr", _NO_TRACE)
_preserve_node_meta = private("torch.fx.traceback", "preserve_node_meta", _NO_TRACE)
_fx_set_stack_trace = private("torch.fx.traceback", "set_stack_trace", _NO_TRACE)
decomposition_table = private("torch._decomp", "decomposition_table", _NO_TRACE, default={})
# A lazy graph module generates its Python source on demand. Torch never frees generated source code.
_lazy_graph_module = private(
    "torch.fx._lazy_graph_module",
    "_use_lazy_graph_module",
    "torch keeps the source of every trace",
    default=lambda should_use: nullcontext(),
)
_fake_results: dict[Any, Any] = private(
    "torch._subclasses.fake_tensor", "FakeTensorMode.cache", "torch keeps the result of every traced call", default={}
)
_engine_run_backward = private("torch.autograd.graph", "_engine_run_backward", _NO_VJP)
core_aten_decompositions = private("torch._decomp", "core_aten_decompositions", _NO_SPLIT)
expect("torch._functorch.partitioners", ["min_cut_rematerialization_partition"], _NO_SPLIT)  # is slow to import
_custom_ops = private(
    "torch._library.custom_ops", "OPDEFS", "`torch.library.custom_op`s are refused in step functions", default={}
)
# Turns off the optimization of scripted functions, so that they run as written during a trace.
_unoptimized: Callable[[bool], Any] = private(
    "torch.jit", "optimized_execution", "scripted steps may be refused", default=lambda optimized: nullcontext()
)
_force_keys = private("torch._C", "_ForceDispatchKeyGuard", _NO_TRACE)
_set_hooks_tracing = private("torch._C", "_autograd._saved_tensors_hooks_set_tracing", _NO_TRACE)
# The dispatch keys of a thread outside of all operators and modes, recorded when this package is imported.
_INCLUDED = private("torch._C", "_dispatch_tls_local_include_set", _NO_TRACE, default=lambda: None)()
_EXCLUDED = private("torch._C", "_dispatch_tls_local_exclude_set", _NO_TRACE, default=lambda: None)()
_without_layers = private(
    "torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack", _NO_TRACE, default=nullcontext
)
_may_set_requires_grad = private("torch._C", "_functorch.get_inplace_requires_grad_allowed", _NO_TRACE)
_let_set_requires_grad = private("torch._C", "_functorch.set_inplace_requires_grad_allowed", _NO_TRACE)
# These attributes are read where they are used, so the results of these probes are not stored.
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

Table = Mapping[Any, Callable[..., Any]]

_MOST_FAKE_RESULTS = 10_000
_AUTOCAST_DEVICES = ("cpu", "cuda")
# For each running trace, the autograd node whose backward formula started it, or `None`. The innermost trace is last.
_enclosing_nodes: list[Any] = []


def forget_fake_results() -> None:
    """Clears torch's cache of calls with fake tensors if the cache is large.

    Each call with a new Python number adds an entry, and torch never removes an entry.
    """
    if len(_fake_results) > _MOST_FAKE_RESULTS:
        _fake_results.clear()


def is_stand_in(tensor: Tensor) -> bool:
    """True for a fake tensor, and for a tensor that an active transform of `torch.func` has wrapped."""
    return isinstance(tensor, FakeTensor) or bool(_is_wrapped(tensor))


def fake_like(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """A fake leaf tensor with the shape, strides, dtype and device of `tensor`, but without its data and gradient.

    The fake tensor is on the CPU if the device of `tensor` is unavailable: `meta`, or a GPU on a machine without GPUs.
    For a device that torch was not built for, autograd aborts the process, even if the tensor is fake.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    device = tensor.device if tensor.device.type in available else torch.device("cpu")
    with _disable_current_modes(), mode, torch.no_grad():
        # `mode.from_tensor` would keep `requires_grad`, and raises an error for a fake tensor of another mode.
        return cast(
            FakeTensor,
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device),
        )


def constant_value(tensor: Tensor) -> str:
    """The values of a tensor that was just created, as text. The values can be read during a trace, too."""
    # FlexSN itself may read values during a trace. A core that reads values is refused.
    with _disable_current_modes(), _without_torch_functions():
        return repr(tensor.tolist())


def set_stack_trace(trace: str) -> None:
    """Attaches `trace` to all nodes that are recorded from now on."""
    _fx_set_stack_trace([trace])


def op_location_key() -> tuple[bool, int]:
    """`(in backward, autograd sequence number)` of the op that is being dispatched.

    An op and the backward formula that autograd runs for it have the same sequence number.
    """
    node = _current_autograd_node()
    if node is not None and node is not _enclosing_nodes[-1]:
        return True, node._sequence_nr()
    # The op's own autograd node already exists, so its number is one less than the next number.
    return False, cast(int, _next_sequence_nr()) - 1


def autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which `torch.autocast` is on, each with its dtype.

    Within `undisturbed`, autocast is on only if the core switched it on.
    """
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


def _uncompiled() -> AbstractContextManager[object]:
    """Runs functions compiled by `torch.compile` as uncompiled Python.

    In recent versions of torch, the context affects the current thread only.
    """
    make_context = getattr(torch._dynamo.eval_frame, "_use_eager_on_nested_compile", None)
    if make_context is None:  # an older torch: compiled functions run uncompiled in other threads, too
        make_context = functools.partial(torch.compiler.set_stance, "force_eager")
    result: AbstractContextManager[object] = make_context()
    return result


@contextmanager
def undisturbed() -> Iterator[None]:
    """Makes a trace independent of the settings of its surroundings, and restores these settings afterwards.

    The trace runs outside of all operators and all transforms of `torch.func`. Autocast, inference mode, other tracers
    and other fake modes are off. Anomaly detection is also off, because it reads values. Compiled and scripted
    functions that the core calls run as uncompiled Python. The backward runs in the current thread, where the dispatch
    modes are active. Only one trace runs at a time, because FX patches Python globals while it traces.
    """
    with TRACE_LOCK, ExitStack() as stack:
        # Inside the implementation of an operator, some dispatch keys that a trace needs are disabled.
        stack.enter_context(_force_keys(_INCLUDED, _EXCLUDED))
        stack.enter_context(_unsaved())
        stack.enter_context(_outside_transforms())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(_unoptimized(False))
        stack.enter_context(_silent("torch._subclasses.fake_tensor"))  # torch's module logs the errors that it raises
        for device in _AUTOCAST_DEVICES:
            # The cache is off, too: it would retain conversions of the fake tensors for the user's parameters.
            stack.enter_context(torch.autocast(device, enabled=False, cache_enabled=False))
        if "torch._dynamo" in sys.modules:  # without Dynamo, nothing is compiled, and its import would be slow
            stack.enter_context(_uncompiled())
            config = torch._dynamo.config
            if hasattr(config, "error_on_nested_fx_trace"):
                stack.enter_context(config.patch(error_on_nested_fx_trace=False))
        _enclosing_nodes.append(_current_autograd_node())
        try:
            yield
        finally:
            _enclosing_nodes.pop()


@contextmanager
def _outside_transforms() -> Iterator[None]:
    """Leaves all transforms of `torch.func`."""
    with _without_layers():
        before = _may_set_requires_grad()
        _let_set_requires_grad(True)
        try:
            yield
        finally:
            _let_set_requires_grad(before)


@contextmanager
def _unsaved() -> Iterator[None]:
    """Disables the caller's saved-tensor hooks, such as those of checkpointing, for tensors saved in a trace."""
    before = _set_hooks_tracing(True)
    try:
        yield
    finally:
        _set_hooks_tracing(before)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def gradients(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Computes gradients like `torch.autograd.grad`, but the call is visible to function modes and retains the graph.

    The backward runs in the current thread, where the modes observe its reads. `torch.autograd.grad` would run the
    backward of a GPU in another thread.
    """
    with torch.autograd.set_multithreading_enabled(False):
        result: tuple[Tensor | None, ...] = _engine_run_backward(
            tuple(roots), tuple(cotangents), True, False, tuple(inputs), True, accumulate_grad=False
        )
    return result


def reachable_nodes(starts: Iterable[Any], stop: Container[Any] = ()) -> Iterator[tuple[Any, Any]]:
    """Yields the autograd nodes that a gradient reaches from `starts`, each with the node from which it is reached.

    For a node in `starts`, the other node is `None`.

    Args:
        stop: nodes at which a gradient ends. These nodes are yielded, but the gradient does not pass through them.
    """
    waiting: list[tuple[Any, Any]] = [(node, None) for node in starts]
    visited = {None}
    while waiting:
        node, previous = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node, previous
        if node not in stop:
            waiting += [(following, node) for following, _ in node.next_functions]


@contextmanager
def recording_nodes(starts: Iterable[Any], stop: Container[Any]) -> Iterator[list[Any]]:
    """Yields a list to which autograd's nodes are appended when they run.

    After an error, the last entry is the node that raised the error.
    """
    executed: list[Any] = []
    hooks = [
        node.register_prehook(functools.partial(_append_node, executed, node))
        for node, _ in reachable_nodes(starts, stop)
        if node not in stop and not hasattr(node, "variable")
    ]
    try:
        yield executed
    finally:
        for hook in hooks:
            hook.remove()


def _append_node(executed: list[Any], node: Any, gradients: Any) -> None:
    executed.append(node)


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disables the gradient hooks of the tensors. The hooks run later, on the real gradient."""
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    try:
        for registry, _ in hooks:
            registry.clear()
        yield
    finally:
        for registry, saved in hooks:
            registry.update(saved)


def custom_op_body(op: OpOverload) -> Callable[..., Any] | None:
    """The Python function of a `torch.library.custom_op`. `None` for other ops, or if devices have other functions."""
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
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[FakeTensor], mode: FakeTensorMode, table: Table
) -> fx.GraphModule:
    """Records the ATen ops that `function(*arguments)` calls, and decomposes the ops in `table`."""
    with mode, _keeping_locations(), _lazy_graph_module(True):
        graph: fx.GraphModule = make_fx(function, decomposition_table=table)(*arguments)
    return graph


@contextmanager
def unrecorded() -> Iterator[None]:
    """Excludes the calls in this context from the graph that `record` builds."""
    with disable_proxy_modes_tracing():
        yield


def trace_again(module: fx.GraphModule, mode: FakeTensorMode, table: Table) -> fx.GraphModule:
    """Traces `module` again without mutation, and decomposes the ops in `table`."""

    def replay(*inputs: Tensor) -> Any:
        return fx.Interpreter(module).run(*inputs)

    arguments = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    functional = torch.func.functionalize(replay, remove="mutations")
    with mode, _keeping_locations(), _lazy_graph_module(True), torch.no_grad():
        graph: fx.GraphModule = make_fx(functional, decomposition_table=table)(*arguments)
    return graph


def rounded(value: float, dtype: torch.dtype) -> float:
    """A Python number, rounded to `dtype`. The function can be called during a trace, too."""
    with _disable_current_modes():
        number: float = torch.tensor(value, dtype=dtype, device="cpu").item()
    return number


def min_cut_partitioner() -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """The function that splits a joint graph so that the fewest bytes are saved."""
    partitioner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = needed(
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition",
        _NO_SPLIT,
        takes=["num_fwd_outputs"],
    )
    return partitioner
