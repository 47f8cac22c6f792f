"""Everything in this package that touches a private API of torch.

Seen working on torch 2.11.0 and 2.13.0. What changes between versions is asked for here and
nowhere else; :func:`why_dynamo_cannot_capture` says in words which hook is missing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._higher_order_ops.utils
from torch._C import DispatchKey
from torch._dispatch.python import suspend_functionalization
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
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
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "REPLACEMENT_OPTIONS",
    "CaptureHooks",
    "CapturedCall",
    "HigherOrderOperator",
    "InductorCall",
    "LowersItself",
    "below_autograd",
    "builtin_scan",
    "builtin_while_loop",
    "capture_with_dynamo",
    "implement",
    "is_tracing",
    "is_transforming",
    "outside_of_tracing",
    "refuse_autograd",
    "register_with_dynamo",
    "trace_step",
    "watch_operators",
    "why_dynamo_cannot_capture",
]

# Any: most of what is in there has no types.
_utils: Any = torch._higher_order_ops.utils
_AnyMode: Any = TorchDispatchMode

builtin_scan: Callable[..., Any] | None
builtin_while_loop: Callable[..., Any] | None
try:
    from torch._higher_order_ops.scan import scan as builtin_scan
except ImportError:
    builtin_scan = None
try:
    from torch._higher_order_ops.while_loop import while_loop as builtin_while_loop
except ImportError:
    builtin_while_loop = None

Samples = Callable[..., Sequence[Sequence[Any]]]


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


@dataclass(frozen=True, slots=True)
class InductorCall:
    """A call of an operator that Inductor lowers.

    Attributes:
        graphs: The ATen graphs that the operator was called with.
        args: The values after them, as Inductor has them; sizes may be among them.
        examples: The same as fake tensors and sizes.
    """

    graphs: tuple[torch.fx.GraphModule, ...]
    args: tuple[Any, ...]
    examples: tuple[Any, ...]

    def without(self, count: int) -> InductorCall:
        """The same without the first ``count`` arguments after the graphs."""
        return InductorCall(self.graphs, self.args[count:], self.examples[count:])

    def inline(self, function: Callable[..., Any]) -> Sequence[Any]:
        """Make what ``function(*args)`` does part of Inductor's graph; it may hold no constants."""
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.lowering import process_subgraph_nodes
        from torch._inductor.virtualized import V
        from torch.fx.experimental.proxy_tensor import make_fx

        with V.fake_mode:
            traced = make_fx(function, decomposition_table=select_decomp_table())(*self.examples)
        # Inductor would look for it in the graph that it is lowering.
        assert not traced.graph.find_nodes(op="get_attr"), "a lowering made a constant tensor"
        return process_subgraph_nodes(traced, list(self.args))  # type: ignore[no-any-return]

    def fall_back_to(self, op: Any, *args: Any) -> Sequence[Any]:
        """Make it a call of an operator that Inductor knows nothing about."""
        from torch._inductor import lowering

        handler: Any = lowering.fallback_handler
        return handler(op, add_to_fallback_set=False)(*args)  # type: ignore[no-any-return]


class LowersItself:
    """Mixin of an operator that Inductor calls, with its own values, to have it lowered.

    Inductor calls a target that has the attribute ``_inductor_lowering_function`` instead of
    looking for a registered lowering, and leaves its fake tensors alone. The latter is right for a
    scan: its results have the same shapes and strides whatever the strides of its arguments.
    """

    _inductor_lowering_function = True

    @staticmethod
    def inductor_call(graphs: Sequence[Any], args: Sequence[Any]) -> InductorCall | None:
        """The call, if it is Inductor that makes it."""
        if type(graphs[0]).__module__ != "torch._inductor.ir":
            return None
        from torch._inductor.virtualized import V

        nodes = V.graph.current_node.args[len(graphs) :]
        examples = tuple(node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in nodes)
        modules = tuple(subgraph.graph_module for subgraph in graphs)
        return InductorCall(modules, tuple(args), examples)


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call of the operator that Dynamo traces, in terms that need no knowledge of Dynamo.

    Attributes:
        core_fn: The core, or None where Dynamo knows no callable for it (its own tracing of the
            call then finds what is wrong).
        args: The positional arguments after the core; tensors are fake.
        kwargs: The keyword arguments, all constants.
    """

    core_fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CaptureHooks:
    """What the package does at the two ends of a capture.

    Attributes:
        before: Checks a call. Gives the keyword arguments of the operator's node, or a function
            with the operator's arguments to trace in its stead.
        after: Checks the captured graph: the call, the graph, sample values (fake) for the graph,
            and what the core returned (tensors are fake).
    """

    before: Callable[[CapturedCall], dict[str, Any] | Callable[..., Any]]
    after: Callable[[CapturedCall, torch.fx.GraphModule, Sequence[Any], Any], None]


REPLACEMENT_OPTIONS = ("output_template_specs", "final_state")
"""Keyword arguments of the operator that a function traced in its stead takes, too."""

_REQUIRED_FOR_DYNAMO = (
    "_hop_name_to_variable_class",
    "TorchHigherOrderOperatorVariable",
    "discard_graph_changes",
    "make_attr",
    "speculate_subgraph",
)


def why_dynamo_cannot_capture() -> str | None:
    """What this version of torch lacks for Dynamo to capture the operator; None if nothing."""
    try:
        from torch._dynamo.variables import higher_order_ops
        from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
    except ImportError as error:
        return f"torch {torch.__version__} has no Dynamo that this package knows: {error}"
    assert callable(wrap_fx_proxy)
    assert callable(SourcelessBuilder.create)
    missing = [name for name in _REQUIRED_FOR_DYNAMO if not hasattr(higher_order_ops, name)]
    if missing:
        return f"torch {torch.__version__} has no {', '.join(missing)} in torch._dynamo.variables.higher_order_ops"
    return None


def register_with_dynamo(name: str, hooks: CaptureHooks) -> None:
    """Teach Dynamo, once it is loaded, to capture the operator ``name`` as one node."""
    if "torch._dynamo.variables.higher_order_ops" not in sys.modules:
        return
    from torch._dynamo.variables import higher_order_ops

    known = getattr(higher_order_ops, "_hop_name_to_variable_class", None)
    if known is None or name in known or why_dynamo_cannot_capture() is not None:
        return
    known[name] = _dynamo_variable(name, hooks)


def _dynamo_variable(name: str, hooks: CaptureHooks) -> type:
    """The class by which Dynamo traces a call of the operator."""
    from torch._dynamo import config
    from torch._dynamo.exc import UncapturedHigherOrderOpError
    from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
    from torch._dynamo.variables.higher_order_ops import (
        TorchHigherOrderOperatorVariable,
        discard_graph_changes,
        make_attr,
        speculate_subgraph,
    )
    from torch._dynamo.variables.lazy import LazyVariableTracker

    @contextlib.contextmanager
    def readable() -> Iterator[None]:
        """Let an error of this package out of Dynamo as what it is, and not as Dynamo's bug."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UncapturedHigherOrderOpError) or type(error).__module__.startswith("torch."):
                raise
            kind = type(error)
            both = type(
                kind.__name__,
                (UncapturedHigherOrderOpError, kind),
                {"__module__": kind.__module__},
            )
            raise both(str(error)) from error

    def example(variable: Any) -> Any:
        """The value that a variable stands for: a fake tensor, a symbolic size or a constant."""
        node = variable.maybe_fx_node() if hasattr(variable, "maybe_fx_node") else None
        if node is not None:
            return node.meta["example_value"]
        return variable.as_python_constant()

    class FlexSNScanVariable(TorchHigherOrderOperatorVariable):
        _HOP_NAME = f"torch.ops.higher_order.{name}"
        _ALLOW_FALLBACK_TO_EAGER = False

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = LazyVariableTracker.realize_all((args, kwargs))
            core, *rest = args
            call = CapturedCall(
                _callable_behind(tx, core),
                (
                    # The counts shape the graph; Dynamo may have made them symbolic.
                    *(int(example(variable)) for variable in rest[:3]),
                    *(example(variable) for variable in rest[3:]),
                ),
                {key: variable.as_python_constant() for key, variable in kwargs.items()},
            )
            with readable():
                options = hooks.before(call)
            if callable(options):
                kept = {key: kwargs[key] for key in REPLACEMENT_OPTIONS if key in kwargs}
                return SourcelessBuilder.create(tx, options).call_function(tx, args, kept)
            num_inputs = call.args[0]
            tensors = rest[3:]

            def sample(variable: Any, is_input: bool) -> Any:
                method, call_args = ("select", [0, 0]) if is_input else ("clone", [])
                constants = [SourcelessBuilder.create(tx, value) for value in call_args]
                copy = variable.call_method(tx, method, constants, {})
                value = copy.as_proxy().node.meta["example_value"]
                # A state may come to need a gradient after the first step; what Dynamo makes of
                # an autograd.Function depends on whether its arguments do.
                if value.dtype.is_floating_point and torch.is_grad_enabled():
                    value.requires_grad_()
                # A leaf that requires grad would be refused in in-place operations, before the
                # mutation is found for what it is.
                return copy.call_method(tx, "clone", [], {})

            with discard_graph_changes(tx):
                samples = [sample(variable, index < num_inputs) for index, variable in enumerate(tensors)]
            with config.patch(specialize_float=True):
                (result, spec), graph, freevars = speculate_subgraph(
                    tx,
                    core,
                    samples,
                    {},
                    self._HOP_NAME,
                    source_target=self.value,
                    set_subgraph_inputs="flatten_manual",
                    should_flatten_outputs=True,
                    supports_input_mutation=False,
                    supports_aliasing=True,
                )
            module = torch.fx.GraphModule(dict(tx.output.nn_modules), graph)
            values = [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")]
            items: Any = result
            returned = _returned(spec, [example(variable) for variable in items.items])
            with readable():
                hooks.after(call, module, values, returned)
            proxies = (
                make_attr(tx, tx.output.install_subgraph(f"{name}_core", module)),
                *call.args[:3],
                *(variable.as_proxy() for variable in tensors),
                *freevars,
            )
            return wrap_fx_proxy(
                tx,
                tx.output.create_proxy("call_function", self.value, args=proxies, kwargs=options),
            )

    return FlexSNScanVariable


def _returned(spec: Any, tensors: Sequence[Any]) -> Any:
    """What the core returned, put together from the tensors that Dynamo took out of it."""
    values: list[Any] = list(tensors)
    if spec.masks_to_filter_const_values is not None:
        came = iter(tensors)
        values = [
            constant if is_constant else next(came)
            for is_constant, constant in zip(spec.masks_to_filter_const_values, spec.const_values, strict=True)
        ]
    return pytree.tree_unflatten(values, spec.treespec.as_python_constant())


def _callable_behind(tx: Any, core: Any) -> Callable[..., Any] | None:
    """Something with the signature of what Dynamo's variable ``core`` stands for, if there is."""
    from torch._dynamo import variables
    from torch._dynamo.variables.functions import FunctoolsPartialVariable

    if isinstance(core, variables.NNModuleVariable):
        return tx.output.get_submodule(core.module_key)  # type: ignore[no-any-return]
    if isinstance(core, variables.UserDefinedObjectVariable):  # modules, callables, bound methods
        return core.value if callable(core.value) else None
    if isinstance(core, FunctoolsPartialVariable):
        inner = _callable_behind(tx, core.func)
        if inner is None:
            return None
        return functools.partial(inner, *[None for _ in core.args], **dict.fromkeys(core.keywords))
    if isinstance(core, variables.UserMethodVariable):
        return types.MethodType(core.fn, object())
    if isinstance(core, variables.UserFunctionVariable):
        return core.fn
    if isinstance(core, variables.NestedUserFunctionVariable) and not core.defaults:
        code = core.get_code()
        cells = tuple(types.CellType() for _ in code.co_freevars)
        return types.FunctionType(code, {}, closure=cells)
    if core.is_python_constant():
        return core.as_python_constant()  # type: ignore[no-any-return]
    return None
