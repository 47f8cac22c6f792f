"""A higher-order operator's implementations, one per dispatch key and mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._higher_order_ops.utils
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Any: most of what is in there has no types.
_utils: Any = torch._higher_order_ops.utils

Samples = Callable[..., Sequence[Sequence[Any]]]


def implement(
    op: Any,
    *,
    dense: Callable[..., Any],
    shapes: Callable[..., Any],
    num_graphs: int,
    samples: Samples,
) -> None:
    """Give ``op`` its implementations, but for autograd.

    The first ``num_graphs`` arguments of ``op`` are callables; ``samples(*args, **kwargs)`` gives
    the arguments that each of them is called with. ``dense`` computes; ``shapes`` gives tensors
    like the results.
    """

    @op.py_impl(DispatchKey.CompositeExplicitAutograd)  # type: ignore[untyped-decorator]
    def dense_implementation(*args: Any, **kwargs: Any) -> Any:
        return dense(*args, **kwargs)

    @op.py_impl(FakeTensorMode)  # type: ignore[untyped-decorator]
    def fake_implementation(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return shapes(*args, **kwargs)

    @op.py_impl(ProxyTorchDispatchMode)  # type: ignore[untyped-decorator]
    def proxy_implementation(mode: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = []
        with disable_proxy_modes_tracing():
            values_by_graph = samples(*args, **kwargs)
        for function, values in zip(args[:num_graphs], values_by_graph, strict=True):
            with disable_proxy_modes_tracing():
                graph = _utils.reenter_make_fx(function)(*values)
            _, name = _utils.unique_graph_id(mode, prefix=f"{op.name()}_graph")
            mode.tracer.root.register_module(name, graph)
            graphs.append(graph)
        traced_args = (*graphs, *args[num_graphs:])
        proxy_args = pytree.tree_map(mode.tracer.unwrap_proxy, traced_args)
        proxy_kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, kwargs)
        proxy = mode.tracer.create_proxy("call_function", op, proxy_args, proxy_kwargs, name=op.name())
        with disable_proxy_modes_tracing():
            results = op.redispatch(*args, **kwargs)
        return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)

    # Selective activation checkpointing treats the operator like any other.
    for mode_class in (_CachingTorchDispatchMode, _CachedTorchDispatchMode):
        _utils.redirect_to_mode(op, mode_class)

    @op.py_functionalize_impl  # type: ignore[untyped-decorator]
    def functional_implementation(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        plain = ctx.unwrap_tensors(args)
        with ctx.redispatch_to_next():
            functions = [
                ctx.functionalize(_utils._maybe_run_with_interpreter(function)) for function in plain[:num_graphs]
            ]
            results = op.redispatch(*functions, *plain[num_graphs:], **kwargs)
        return ctx.wrap_tensors(results)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Calls inside go to the implementation below autograd."""
    return torch._C._AutoDispatchBelowAutograd()


def refuse_autograd(op: Any) -> None:
    """Give ``op`` an autograd implementation that raises when its gradient is asked for."""
    op.py_autograd_impl(_utils.autograd_not_implemented(op, deferred_error=True))
