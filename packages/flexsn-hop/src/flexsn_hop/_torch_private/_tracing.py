"""Graphs that are being made: whether one is, and how to make one beside it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._higher_order_ops.utils
from torch._C import DispatchKey
from torch._dispatch.python import suspend_functionalization
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _temp_remove_pre_dispatch_torch_function_mode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# Any: most of what is in there has no types.
_utils: Any = torch._higher_order_ops.utils
_AnyMode: Any = TorchDispatchMode


def is_tracing(values: Sequence[Any]) -> bool:
    """Whether a graph is being made, or shapes are being propagated, instead of computing."""
    if any(
        isinstance(value, (FakeTensor, FunctionalTensor))
        or (isinstance(value, torch.Tensor) and torch._is_functional_tensor(value))
        for value in values
    ):
        return True
    modes = (FakeTensorMode, ProxyTorchDispatchMode, FunctionalTensorMode)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack()) or get_proxy_mode() is not None


def is_transforming() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def capture_with_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` through Dynamo, so that what it closes over becomes an argument.

    An active tracer then sees the captured graph instead of the Python function.
    """
    with warnings.catch_warnings():
        # Dynamo looks at the gradients of its arguments, of which torch warns where they are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        return _utils._maybe_compile_and_run_fn(function, *args)


@contextlib.contextmanager
def outside_of_tracing(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Fake copies of ``values``, in a place that no tracer, proxy or functionalization sees."""
    fake_mode = detect_fake_mode(list(values)) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)

    with contextlib.ExitStack() as stack:
        # Export records even changes of the grad mode, by a mode of its own.
        stack.enter_context(_temp_remove_pre_dispatch_torch_function_mode())
        stack.enter_context(suspend_functionalization())
        stack.enter_context(disable_functional_mode())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(fake_mode)
        with disable_proxy_modes_tracing():
            fakes = [fake(value) for value in values]
        yield fakes


@contextlib.contextmanager
def watch_operators(
    callback: Callable[[Any, Sequence[Any], dict[str, Any]], None],
) -> Iterator[None]:
    """Call ``callback(op, args, kwargs)`` before every operator that runs on tensors."""

    class Watch(_AnyMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            callback(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def trace_step(function: Callable[..., Any], samples: Sequence[Any]) -> torch.fx.GraphModule:
    """The ATen graph of ``function``, which may differentiate, at values like ``samples``."""
    # The keys that a fresh call would see: inside autograd's own implementation some are excluded.
    nothing = torch._C.DispatchKeySet(DispatchKey.Undefined)
    graph: torch.fx.GraphModule = _utils.materialize_as_graph(
        function,
        tuple(samples),
        include_key_set=torch._C._dispatch_tls_local_include_set(),
        exclude_key_set=nothing,
        force_enable_grad=True,
    )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
