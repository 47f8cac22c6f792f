"""How Dynamo captures a call of the operator as one node."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..versions import expect, lacking, private

_tree_unflatten = private("torch.utils._pytree", "tree_unflatten", "`torch.compile` cannot capture `flex_sn_scan`")


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
            that is to be traced in its stead.
        instead: Takes that function, and then the operator's arguments as far as they are among
            its positional ones, ``output_template_specs`` and ``final_state``.
        after: Checks the captured graph: the call, the graph, sample values (fake) for the graph,
            and what the core returned (tensors are fake).
    """

    before: Callable[[CapturedCall], dict[str, Any] | Callable[..., Any]]
    instead: Callable[..., Any]
    after: Callable[[CapturedCall, torch.fx.GraphModule, Sequence[Any], Any], None]


_REPLACEMENT_OPTIONS = ("output_template_specs", "final_state")
"""Keyword arguments of the operator that matter to what is traced in its stead, too."""

_CONSEQUENCE = "`torch.compile` breaks its graph at `flex_sn_scan`, which then runs as a loop"

_REQUIRED_FOR_DYNAMO: dict[str, tuple[str, ...]] = {
    "torch._dynamo.variables.higher_order_ops": (
        "_hop_name_to_variable_class",
        "TorchHigherOrderOperatorVariable",
        "discard_graph_changes",
        "make_attr",
        "speculate_subgraph",
        "speculate_subgraph.set_subgraph_inputs",
        "speculate_subgraph.should_flatten_outputs",
        "speculate_subgraph.source_target",
        "speculate_subgraph.supports_aliasing",
        "speculate_subgraph.supports_input_mutation",
    ),
    "torch._dynamo.config": ("specialize_float",),
    "torch._dynamo.exc": ("UncapturedHigherOrderOpError",),
    "torch._dynamo.output_graph": ("OutputGraph.install_subgraph",),
    "torch._dynamo.variables": (
        "NNModuleVariable",
        "NestedUserFunctionVariable",
        "UserDefinedObjectVariable",
        "UserFunctionVariable",
        "UserMethodVariable",
    ),
    "torch._dynamo.variables.base": ("VariableTracker.maybe_fx_node",),
    "torch._dynamo.variables.builder": ("SourcelessBuilder", "wrap_fx_proxy"),
    "torch._dynamo.variables.functions": ("FunctoolsPartialVariable",),
    "torch._dynamo.variables.lazy": ("LazyVariableTracker.realize_all",),
}


def why_dynamo_cannot_capture() -> str | None:
    """What this version of torch lacks for Dynamo to capture the operator; None if nothing."""
    missing = [
        f"{module}.{name}" for module, names in _REQUIRED_FOR_DYNAMO.items() for name in lacking(module, names)
    ]
    return f"torch {torch.__version__} has no {', no '.join(missing)}: {_CONSEQUENCE}" if missing else None


for _module, _names in _REQUIRED_FOR_DYNAMO.items():
    expect(_module, _names, _CONSEQUENCE)


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
                kept = {key: kwargs[key] for key in _REPLACEMENT_OPTIONS if key in kwargs}
                instead = [SourcelessBuilder.create(tx, function) for function in (hooks.instead, options)]
                return instead[0].call_function(tx, [instead[1], *args], kept)
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
    return _tree_unflatten(values, spec.treespec.as_python_constant())


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
