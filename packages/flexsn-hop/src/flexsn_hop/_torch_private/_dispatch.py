"""Registers the implementations of a higher-order operator, one for each dispatch key and mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_hop._torch_private._tracing import numbers_of_a_step
from flexsn_hop.versions import private

_NO_OPERATOR = "`flex_sn_scan` cannot be called"
_NO_GRAPH = "`flex_sn_scan` cannot be traced, exported or compiled"
_NO_GRADIENT = "`flex_sn_scan` has no gradient"

DispatchKey = private("torch._C", "DispatchKey", _NO_OPERATOR)
FakeTensorMode = private("torch._subclasses.fake_tensor", "FakeTensorMode", _NO_GRAPH)
ProxyTorchDispatchMode = private("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode", _NO_GRAPH)
disable_proxy_modes_tracing = private("torch.fx.experimental.proxy_tensor", "disable_proxy_modes_tracing", _NO_GRAPH)
track_tensor_tree = private("torch.fx.experimental.proxy_tensor", "track_tensor_tree", _NO_GRAPH)
tree_map = private("torch.utils._pytree", "tree_map", _NO_GRAPH)
_reenter_make_fx = private("torch._higher_order_ops.utils", "reenter_make_fx", _NO_GRAPH)
_unique_graph_id = private("torch._higher_order_ops.utils", "unique_graph_id", _NO_GRAPH, takes=["prefix"])
_maybe_run_with_interpreter = private("torch._higher_order_ops.utils", "_maybe_run_with_interpreter", _NO_GRAPH)
_below_autograd = private("torch._C", "_AutoDispatchBelowAutograd", _NO_GRADIENT)
_autograd_not_implemented = private(
    "torch._higher_order_ops.utils", "autograd_not_implemented", _NO_GRADIENT, takes=["deferred_error"]
)
_NO_EFFECTS = "operators with effects, like the checks of `torch.linalg`, cannot be part of a core"
_make_token = private("torch.ops", "prims._make_token.default", _NO_EFFECTS)
_sink_tokens = private("torch.ops", "prims._sink_tokens.default", _NO_EFFECTS)
_NO_CHECKPOINTS = "selective activation checkpointing ignores `flex_sn_scan`"
_redirect_to_mode = private(
    "torch._higher_order_ops.utils", "redirect_to_mode", _NO_CHECKPOINTS, default=lambda op, mode: None
)
_CHECKPOINT_MODES = [
    private("torch.utils.checkpoint", name, _NO_CHECKPOINTS, default=None)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
]

Samples = Callable[..., Sequence[Sequence[Any]]]


def implement(
    op: Any,
    *,
    dense: Callable[..., Any],
    shapes: Callable[..., Any],
    num_graphs: int,
    samples: Samples,
) -> None:
    """Registers implementations of ``op``, except for autograd.

    The first ``num_graphs`` arguments of ``op`` are callables. ``samples(*args, **kwargs)`` returns
    the arguments for a call of each callable. ``dense`` computes the results. ``shapes`` returns tensors with the
    shapes and dtypes of the results.
    """

    @op.py_impl(DispatchKey.CompositeExplicitAutograd)  # type: ignore[untyped-decorator]
    def dense_implementation(*args: Any, **kwargs: Any) -> Any:
        return dense(*args, **kwargs)

    @op.py_impl(FakeTensorMode)  # type: ignore[untyped-decorator]
    def fake_implementation(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode, numbers_of_a_step(mode=mode):
            return shapes(*args, **kwargs)

    @op.py_impl(ProxyTorchDispatchMode)  # type: ignore[untyped-decorator]
    def proxy_implementation(mode: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = []
        with disable_proxy_modes_tracing():
            values_by_graph = samples(*args, **kwargs)
        for function, values in zip(args[:num_graphs], values_by_graph, strict=True):
            with disable_proxy_modes_tracing():
                graph = _reenter_make_fx(function)(*_separate(values))
            _, name = _unique_graph_id(mode, prefix=f"{op.name()}_graph")
            mode.tracer.root.register_module(name, graph)
            graphs.append(graph)
        traced_args = (*graphs, *args[num_graphs:])
        proxy_args = tree_map(mode.tracer.unwrap_proxy, traced_args)
        proxy_kwargs = tree_map(mode.tracer.unwrap_proxy, kwargs)
        proxy = mode.tracer.create_proxy("call_function", op, proxy_args, proxy_kwargs, name=op.name())
        with disable_proxy_modes_tracing():
            results = op.redispatch(*args, **kwargs)
        return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)

    # Selective activation checkpointing then treats the operator like any other operator.
    for mode_class in _CHECKPOINT_MODES:
        if mode_class is not None:
            _redirect_to_mode(op, mode_class)

    @op.py_functionalize_impl  # type: ignore[untyped-decorator]
    def functional_implementation(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        plain = ctx.unwrap_tensors(args)
        with ctx.redispatch_to_next():
            functions = [
                ctx.functionalize(_isolate_effects(ctx, _maybe_run_with_interpreter(function)))
                for function in plain[:num_graphs]
            ]
            results = op.redispatch(*functions, *plain[num_graphs:], **kwargs)
        return ctx.wrap_tensors(results)


def _isolate_effects(ctx: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, with separate tokens for operators with effects, such as the check in ``linalg.solve``.

    A functional graph orders operators with effects by tokens. The graph of ``function`` cannot use the tokens of the
    outer graph, because these tokens are not values of the graph of ``function``.
    """
    mode: Any = getattr(ctx, "mode", None)
    if not hasattr(mode, "_tokens"):
        return function

    def run(*args: Any) -> Any:
        outer_tokens, mode._tokens = mode._tokens, _Tokens()
        try:
            results = function(*args)
            if mode._tokens:
                _sink_tokens([ctx.unwrap_tensors(token) for token in mode._tokens.values()])
            return results
        finally:
            mode._tokens = outer_tokens

    return run


class _Tokens(dict[Any, Any]):
    """Tokens by kind of effect. The first lookup of a kind creates its token."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: Any) -> torch.Tensor:
        token: torch.Tensor = _make_token()
        self[kind] = token
        return token


def _separate(values: Sequence[Any]) -> list[Any]:
    """Returns a copy of the list ``values``, in which a new tensor replaces each repetition of an earlier tensor.

    A repeated tensor would become a single argument of the graph. However, two states that start from the same tensor
    are different from the second step on.
    """
    seen_ids: set[int] = set()
    results = []
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) in seen_ids:
            value = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        seen_ids.add(id(value))
        results.append(value)
    return results


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which calls run the implementation below autograd."""
    guard: contextlib.AbstractContextManager[None] = _below_autograd()
    return guard


def refuse_autograd(op: Any) -> None:
    """Registers an autograd implementation of ``op`` that raises an error when a gradient of ``op`` is computed."""
    op.py_autograd_impl(_autograd_not_implemented(op, deferred_error=True))
