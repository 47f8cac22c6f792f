"""Detects active tracers, and runs or traces functions independently of the active tracers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flexsn_hop.versions import private

_NO_GRAPH = "`flex_sn_scan` cannot be traced, exported or compiled"
_NO_GRADIENT = "a traced or compiled `flex_sn_scan` has no gradient"
_NO_CHECK = "cores are not checked before they are compiled"
_NO_TRANSFORM_CHECK = "`flex_sn_scan` cannot detect whether it is inside of a transform of torch.func"

_detect_fake_mode = private("torch._guards", "detect_fake_mode", _NO_GRAPH)
FakeTensor = private("torch._subclasses.fake_tensor", "FakeTensor", _NO_GRAPH)
FakeTensorMode = private("torch._subclasses.fake_tensor", "FakeTensorMode", _NO_GRAPH)
FunctionalTensor = private("torch._subclasses.functional_tensor", "FunctionalTensor", _NO_GRAPH)
FunctionalTensorMode = private("torch._subclasses.functional_tensor", "FunctionalTensorMode", _NO_GRAPH)
disable_functional_mode = private("torch._subclasses.functional_tensor", "disable_functional_mode", _NO_GRAPH)
ProxyTorchDispatchMode = private("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode", _NO_GRAPH)
disable_proxy_modes_tracing = private("torch.fx.experimental.proxy_tensor", "disable_proxy_modes_tracing", _NO_GRAPH)
get_proxy_mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode", _NO_GRAPH)
_without_pre_dispatch_mode = private(
    "torch.fx.experimental.proxy_tensor", "_temp_remove_pre_dispatch_torch_function_mode", _NO_GRAPH
)
_enable_python_dispatcher = private("torch._dispatch.python", "enable_python_dispatcher", _NO_GRAPH)
suspend_functionalization = private("torch._dispatch.python", "suspend_functionalization", _NO_GRAPH)
_is_functional_tensor = private("torch", "_is_functional_tensor", _NO_GRAPH)
_disable_current_modes = private("torch.utils._python_dispatch", "_disable_current_modes", _NO_GRAPH)
_get_current_dispatch_mode_stack = private(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", _NO_GRAPH
)
_AnyMode: Any = private("torch.utils._python_dispatch", "TorchDispatchMode", _NO_CHECK)
_maybe_compile_and_run_fn = private("torch._higher_order_ops.utils", "_maybe_compile_and_run_fn", _NO_GRAPH)
_materialize_as_graph = private(
    "torch._higher_order_ops.utils",
    "materialize_as_graph",
    _NO_GRADIENT,
    takes=["include_key_set", "exclude_key_set", "force_enable_grad"],
)
DispatchKey = private("torch._C", "DispatchKey", _NO_GRADIENT)
_DispatchKeySet = private("torch._C", "DispatchKeySet", _NO_GRADIENT)
_included_keys = private("torch._C", "_dispatch_tls_local_include_set", _NO_GRADIENT)
_excluded_keys = private("torch._C", "_dispatch_tls_local_exclude_set", _NO_GRADIENT)
_peek_interpreter_stack = private("torch._C", "_functorch.peek_interpreter_stack", _NO_TRANSFORM_CHECK)


def is_tracing(values: Sequence[Any]) -> bool:
    """True if a graph is being traced or shapes are being propagated. Tensors may then have no values."""
    if any(
        isinstance(value, (FakeTensor, FunctionalTensor))
        or (isinstance(value, torch.Tensor) and _is_functional_tensor(value))
        for value in values
    ):
        return True
    modes = (FakeTensorMode, ProxyTorchDispatchMode, FunctionalTensorMode)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack()) or get_proxy_mode() is not None


def is_transforming() -> bool:
    """True if a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return _peek_interpreter_stack() is not None


def capture_with_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function`` through Dynamo, which turns its closure variables into arguments.

    An active tracer then records the captured graph instead of the Python function.
    """
    with warnings.catch_warnings():
        # Dynamo reads `.grad` of its arguments. Torch issues a warning about this for tensors that are not leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        return _maybe_compile_and_run_fn(function, *args)


@contextlib.contextmanager
def outside_of_tracing(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Returns a context with fake copies of ``values``, in which no tracer records and nothing is functionalized."""
    fake_mode = _detect_fake_mode(list(values)) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)

    with contextlib.ExitStack() as stack:
        # Export also records changes of the grad mode, with a separate mode.
        stack.enter_context(_without_pre_dispatch_mode())
        stack.enter_context(suspend_functionalization())
        stack.enter_context(disable_functional_mode())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(fake_mode)
        # Without the Python dispatcher, composite operators in C++, such as recurrent cells, specialize symbolic sizes.
        stack.enter_context(_enable_python_dispatcher())
        stack.enter_context(numbers_of_a_step(mode=fake_mode))
        with disable_proxy_modes_tracing():
            fakes = [fake(value) for value in values]
        yield fakes


def numbers_of_a_step(values: Sequence[Any] = (), mode: Any = None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a step may read a number from a tensor (``.item()``).

    Without this context, the tracer raises an error unless a result contains the symbol of the number. The fake mode is
    ``mode``, or the fake mode of ``values``.
    """
    shape_env = getattr(mode or _detect_fake_mode(list(values)), "shape_env", None)
    ignore = getattr(shape_env, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    guard: contextlib.AbstractContextManager[None] = ignore()
    return guard


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Returns a context in which errors of operators on fake tensors are raised without logging a traceback."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextlib.contextmanager
def watch_operators(
    callback: Callable[[Any, Sequence[Any], dict[str, Any]], None],
    inside: Sequence[torch.fx.GraphModule] = (),
) -> Iterator[None]:
    """Returns a context in which ``callback(op, args, kwargs)`` is called before every operator on tensors.

    An operator such as ``cond`` runs its graphs without the mode that calls ``callback``. The graphs in ``inside``
    enable this mode again.
    """

    class Watch(_AnyMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            callback(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    active: list[Any] = []

    def enter(*_: Any) -> None:
        active.append(Watch().__enter__())

    def leave(*_: Any) -> None:
        active.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for module in inside:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(Watch())
        yield


def trace_step(function: Callable[..., Any], samples: Sequence[Any]) -> torch.fx.GraphModule:
    """Traces ``function`` to an ATen graph, for values like ``samples``. The function may compute derivatives."""
    # The trace uses the dispatch keys of a call outside of the operator, since the operator's autograd implementation
    # excludes some keys. Only the keys of autocast remain excluded, if autocast is off.
    autocast = _DispatchKeySet(DispatchKey.Undefined)
    for name in dir(DispatchKey):
        if name.startswith("Autocast"):
            autocast = autocast | _DispatchKeySet(getattr(DispatchKey, name))
    graph: torch.fx.GraphModule = _materialize_as_graph(
        function,
        tuple(samples),
        include_key_set=_included_keys(),
        exclude_key_set=_excluded_keys() & autocast,
        force_enable_grad=True,
    )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
