"""Makes Dynamo capture a call of the operator as one node."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop.versions import expect, lacking, private

_NO_CAPTURE = "`torch.compile` cannot capture `flex_sn_scan`"
_tree_flatten = private("torch.utils._pytree", "tree_flatten", _NO_CAPTURE)
_tree_unflatten = private("torch.utils._pytree", "tree_unflatten", _NO_CAPTURE)


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call of the operator that Dynamo traces, independent of Dynamo's classes.

    Attributes:
        core_fn: An object with the signature of the core, or None if Dynamo cannot represent the core as a callable. In
            that case, Dynamo reports the problem when it traces the core.
        args: The positional arguments after the core. Tensors are fake.
        kwargs: The keyword arguments, which are constants.
    """

    core_fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CaptureHooks:
    """Functions of this package that Dynamo's variable calls before and after Dynamo captures a call.

    Attributes:
        before: Function that checks a call, and returns the keyword arguments of the operator's node, or a function
            that Dynamo traces instead of the operator.
        call_replacement: Function that calls a function that ``before`` has returned. Its arguments are this function,
            the operator's positional arguments, and the keyword arguments ``output_template_specs`` and ``final_state``
            if they were passed.
        after: Function that checks the captured graph. Its arguments are the call, the graph, fake sample values for
            the graph, and the result of the core, in which tensors are fake.
    """

    before: Callable[[CapturedCall], dict[str, Any] | Callable[..., Any]]
    call_replacement: Callable[..., Any]
    after: Callable[[CapturedCall, torch.fx.GraphModule, Sequence[Any], Any], None]


@dataclass(frozen=True, slots=True)
class DynamoStep:
    """The graph of a step that Dynamo has captured.

    Attributes:
        graph: The graph. Its results are the leaves of the step's return value that are tensors.
        samples: Fake values of the arguments of the graph.
        results: Fake values of the results of the graph. If a step returns one tensor twice, this list contains the
            same object twice.
        returned: The step's return value, which contains the tensors in ``results``.
    """

    graph: torch.fx.GraphModule
    samples: Sequence[Any]
    results: Sequence[Any]
    returned: Any


@dataclass(frozen=True, slots=True)
class CapturedTreeCall:
    """A call, traced by Dynamo, of the operator on trees. Tensors are fake.

    Attributes:
        step: An object with the signature of the step, or None if Dynamo cannot represent the step as a callable.
        carry_leaves, carry_spec: ``init``, flattened.
        x_leaves, x_spec: ``xs``, flattened.
        length, reverse, dim, remat: The other arguments of ``scan``.
    """

    step: Callable[..., Any] | None
    carry_leaves: Sequence[Any]
    carry_spec: Any
    x_leaves: Sequence[Any]
    x_spec: Any
    length: Any
    reverse: Any
    dim: Any
    remat: Any


@dataclass(frozen=True, slots=True)
class TreeParts:
    """Python functions that Dynamo traces before and after the operator.

    Attributes:
        flatten: Maps ``(init, xs)`` to ``(carry leaves, carry spec, x leaves, x spec)``.
        open: Maps the step, these four values, length, reverse, dim and remat to the core, the input sequences
            and the states.
        close: Maps the operator's results to the result of ``scan``. It also takes the carry leaves and the carry
            spec; for each leaf of the step's return value, the index of the operator's result, or None if the leaf is
            None; the structure of the return value; and the number of outputs, reverse, dim and remat.
    """

    flatten: Callable[..., Any]
    open: Callable[..., Any]
    close: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TreeCaptureHooks:
    """Functions of this package that Dynamo's variable calls before and after Dynamo captures a call on trees.

    Attributes:
        before: Function that checks a call, and returns the keyword arguments of the operator's node, or a function of
            the operator's arguments that Dynamo traces instead of the operator.
        after: Function that checks the captured step, and returns the positions of a core's results among the results
            of the graph; for each leaf of the step's return value, the index of the core's result, or None if the leaf
            is None; and the number of outputs.
        parts: The functions that Dynamo traces before and after the operator.
        operator: The target of the graph's node.
    """

    before: Callable[[CapturedTreeCall], dict[str, Any] | Callable[..., Any]]
    after: Callable[[CapturedTreeCall, DynamoStep], tuple[list[int], list[int | None], int]]
    parts: TreeParts
    operator: Any


_REPLACEMENT_OPTIONS = ("output_template_specs", "final_state")
"""The operator's keyword arguments that Dynamo also passes to a function that it traces instead of the operator."""

_CONSEQUENCE = "`torch.compile` breaks its graph at `flex_sn_scan`, which then runs as a loop"

_REQUIRED_FOR_DYNAMO: dict[str, tuple[str, ...]] = {
    "torch._dynamo.variables.higher_order_ops": (
        "_hop_name_to_variable_class",
        "TorchHigherOrderOperatorVariable",
        "discard_graph_changes",
        "make_attr",
        "speculate_subgraph",
        "speculate_subgraph.restore_side_effects",
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
    "torch._dynamo.variables.base": ("VariableTracker.call_function", "VariableTracker.maybe_fx_node"),
    "torch._dynamo.variables.builder": ("SourcelessBuilder", "wrap_fx_proxy"),
    "torch._dynamo.variables.functions": ("FunctoolsPartialVariable",),
    "torch._dynamo.variables.lazy": ("LazyVariableTracker.realize_all",),
    "torch.fx.experimental.symbolic_shapes": ("guard_scalar",),
}


def why_dynamo_cannot_capture() -> str | None:
    """Returns a message about required private names that this torch lacks; None if no name is missing."""
    missing = [f"{module}.{name}" for module, names in _REQUIRED_FOR_DYNAMO.items() for name in lacking(module, names)]
    return f"torch {torch.__version__} has no {', no '.join(missing)}: {_CONSEQUENCE}" if missing else None


for _module, _names in _REQUIRED_FOR_DYNAMO.items():
    expect(_module, _names, _CONSEQUENCE)


def register_with_dynamo(name: str, hooks: CaptureHooks | TreeCaptureHooks) -> None:
    """Makes Dynamo capture the operator ``name`` as one node. Does nothing if Dynamo is not loaded."""
    if "torch._dynamo.variables.higher_order_ops" not in sys.modules:
        return
    from torch._dynamo.variables import higher_order_ops

    variable_classes = getattr(higher_order_ops, "_hop_name_to_variable_class", None)
    if variable_classes is None or name in variable_classes or why_dynamo_cannot_capture() is not None:
        return
    variable_classes[name] = _make_variable_class(name, hooks)


def _make_variable_class(name: str, hooks: CaptureHooks | TreeCaptureHooks) -> type:
    """Returns the class with which Dynamo traces a call of the operator."""
    from torch._dynamo import config
    from torch._dynamo.exc import UncapturedHigherOrderOpError
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
    from torch._dynamo.variables.higher_order_ops import (
        TorchHigherOrderOperatorVariable,
        discard_graph_changes,
        make_attr,
        speculate_subgraph,
    )
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    @contextlib.contextmanager
    def readable() -> Iterator[None]:
        """Returns a context in which Dynamo raises errors of this package, not internal errors of Dynamo."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UncapturedHigherOrderOpError) or type(error).__module__.startswith("torch."):
                raise
            kind = type(error)
            combined_class = type(
                kind.__name__,
                (UncapturedHigherOrderOpError, kind),
                {"__module__": kind.__module__},
            )
            raise combined_class(str(error)) from error

    def example(variable: Any) -> Any:
        """Returns the value of a variable: a fake tensor, a symbolic size or a constant.

        For any other object, returns a stand-in whose class has the name of the object's class.
        """
        if _is_number_or_tensor(variable):
            return variable.maybe_fx_node().meta["example_value"]
        try:
            return variable.as_python_constant()
        except NotImplementedError:
            return _make_likeness(variable.python_type())

    def constant(tx: Any, variable: Any) -> Any:
        """Returns the value of an option.

        Dynamo makes numbers symbolic if an FSDP module contains them. This function specializes such numbers.
        """
        try:
            return variable.as_python_constant()
        except NotImplementedError:
            pass
        if _is_number_or_tensor(variable):
            return guard_scalar(example(variable))
        return tuple(constant(tx, item) for item in variable.unpack_var_sequence(tx))

    def inline(tx: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Traces a call of ``function`` with variables."""
        return SourcelessBuilder.create(tx, function).call_function(tx, list(args), kwargs)

    class FlattenedCore(VariableTracker):
        """A variable that calls a core, and returns the leaves of the core's result.

        After a call, ``spec`` is a variable with the structure of the result. ``stand_ins`` contains, by position, a
        stand-in for each leaf that no graph can return.
        """

        def __init__(self, core: Any) -> None:
            super().__init__()
            self.core = core
            self.spec: Any = None
            self.stand_ins: dict[int, Any] = {}

        def returned(self, values: list[Any]) -> Any:
            """Rebuilds the core's result from its leaves ``values``."""
            leaves = [self.stand_ins.get(index, value) for index, value in enumerate(values)]
            return _tree_unflatten(leaves, self.spec.as_python_constant())

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            # Dynamo also enters this context when it restores side effects.
            with getattr(tx.output.side_effects, "defer_side_effect_checks", contextlib.nullcontext)():
                returned = self.core.call_function(tx, args, kwargs)
            leaves, self.spec = LazyVariableTracker.realize_all(inline(tx, _tree_flatten, returned).items)
            items = list(leaves.items)
            for index, leaf in enumerate(items):
                if not (_is_number_or_tensor(leaf) or leaf.is_python_constant()):
                    self.stand_ins[index] = _make_likeness(leaf.python_type())
                    items[index] = SourcelessBuilder.create(tx, None)
            return inline(tx, tuple, SourcelessBuilder.create(tx, items))

    def specialized(tx: Any, variable: Any) -> Any:
        """Returns a constant variable for a symbolic integer, such as `dim`. Returns other variables unchanged.

        The graph depends on the value of such an integer.
        """
        value = example(variable)
        return SourcelessBuilder.create(tx, int(value)) if isinstance(value, torch.SymInt) else variable

    def capture(tx: Any, core: Any, num_inputs: int, tensors: Sequence[Any], op: Any) -> Any:
        """Captures the graph of one step. ``tensors`` are the input sequences, the states and the lifted tensors.

        Returns the `DynamoStep`, the structure of the step's return value, and the proxies of the captured tensors.
        """

        def sample(variable: Any, is_input: bool) -> Any:
            method, call_args = ("select", [0, 0]) if is_input else ("clone", [])
            constants = [SourcelessBuilder.create(tx, value) for value in call_args]
            copy = variable.call_method(tx, method, constants, {})
            value = copy.as_proxy().node.meta["example_value"]
            # A state may require a gradient from the second step on. Dynamo treats an autograd.Function
            # differently if its arguments require gradients.
            if value.dtype.is_floating_point and torch.is_grad_enabled():
                value.requires_grad_()
            # The copy is not a leaf that requires grad: for such a leaf, an in-place operation would fail before
            # Dynamo reports it as a mutation.
            return copy.call_method(tx, "clone", [], {})

        with discard_graph_changes(tx):
            samples = [sample(variable, index < num_inputs) for index, variable in enumerate(tensors)]
        flattened = FlattenedCore(core)
        with config.patch(specialize_float=True):
            (result, spec), graph, freevars = speculate_subgraph(
                tx,
                flattened,
                samples,
                {},
                f"torch.ops.higher_order.{name}",
                source_target=op,
                set_subgraph_inputs="flatten_manual",
                should_flatten_outputs=True,
                # Otherwise, Dynamo discards the contents of objects that the step has created.
                restore_side_effects=False,
                supports_input_mutation=False,
                supports_aliasing=True,
            )
        items: Any = result
        results = [example(variable) for variable in items.items]
        step = DynamoStep(
            torch.fx.GraphModule(dict(tx.output.nn_modules), graph),
            [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")],
            results,
            flattened.returned(_insert_constants(spec, results)),
        )
        return step, flattened.spec, freevars

    def node(tx: Any, graph: torch.fx.GraphModule, op: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Adds the operator's node to the graph that Dynamo constructs."""
        core = make_attr(tx, tx.output.install_subgraph("flex_sn_scan_core", graph))
        return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", op, args=(core, *args), kwargs=options))

    class FlexSNScanVariable(TorchHigherOrderOperatorVariable):
        _HOP_NAME = f"torch.ops.higher_order.{name}"
        _ALLOW_FALLBACK_TO_EAGER = False

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            assert isinstance(hooks, CaptureHooks)
            args, kwargs = LazyVariableTracker.realize_all((args, kwargs))
            core, *rest = args
            call = CapturedCall(
                _find_callable(tx, core),
                (
                    # The counts determine the graph, so they must be ints, although Dynamo may have made them symbolic.
                    *(int(example(variable)) for variable in rest[:3]),
                    *(example(variable) for variable in rest[3:]),
                ),
                {key: constant(tx, variable) for key, variable in kwargs.items()},
            )
            with readable():
                options = hooks.before(call)
            if callable(options):
                replacement_options = {key: kwargs[key] for key in _REPLACEMENT_OPTIONS if key in kwargs}
                return inline(
                    tx, hooks.call_replacement, SourcelessBuilder.create(tx, options), *args, **replacement_options
                )
            tensors = rest[3:]
            step, _, freevars = capture(tx, core, call.args[0], tensors, self.value)
            with readable():
                hooks.after(call, step.graph, step.samples, step.returned)
            proxies = (*call.args[:3], *(variable.as_proxy() for variable in tensors), *freevars)
            return node(tx, step.graph, self.value, proxies, options)

    class TreeScanVariable(TorchHigherOrderOperatorVariable):
        _HOP_NAME = f"torch.ops.higher_order.{name}"
        _ALLOW_FALLBACK_TO_EAGER = False

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            assert isinstance(hooks, TreeCaptureHooks)
            args, _ = LazyVariableTracker.realize_all((args, kwargs))
            step_variable, init, xs, length, *options = args
            options_given = [length, *(specialized(tx, variable) for variable in options)]
            args = (step_variable, init, xs, *options_given)
            parts = LazyVariableTracker.realize_all(inline(tx, hooks.parts.flatten, init, xs).items)
            call = CapturedTreeCall(
                _find_callable(tx, step_variable),
                [example(variable) for variable in parts[0].items],
                parts[1].as_python_constant(),
                [example(variable) for variable in parts[2].items],
                parts[3].as_python_constant(),
                *(example(variable) for variable in options_given),
            )
            with readable():
                options = hooks.before(call)
            if callable(options):
                return inline(tx, options, *args)
            core, inputs, states = inline(tx, hooks.parts.open, step_variable, *parts, *options_given).items
            tensors = [*inputs.items, *states.items]
            counts = len(inputs.items), len(states.items)
            step, spec, freevars = capture(tx, core, counts[0], tensors, hooks.operator)
            with readable():
                order, result_indices, num_outputs = hooks.after(call, step)
            (output,) = step.graph.graph.find_nodes(op="output")
            output.args = (tuple(output.args[0][position] for position in order),)
            step.graph.recompile()
            proxies = (*counts, num_outputs, *(variable.as_proxy() for variable in tensors), *freevars)
            results = node(tx, step.graph, hooks.operator, proxies, options)
            constants = [SourcelessBuilder.create(tx, value) for value in (result_indices, num_outputs)]
            trees = (*parts[:2], constants[0], spec, constants[1])
            return inline(tx, hooks.parts.close, results, *trees, *options_given[1:])

    return FlexSNScanVariable if isinstance(hooks, CaptureHooks) else TreeScanVariable


def _is_number_or_tensor(variable: Any) -> bool:
    """True if ``variable`` is a tensor or number in the graph. False for a NumPy array, which Dynamo emulates."""
    node = variable.maybe_fx_node() if hasattr(variable, "maybe_fx_node") else None
    if node is None:
        return False
    return not isinstance(node.meta["example_value"], torch.Tensor) or issubclass(variable.python_type(), torch.Tensor)


def _make_likeness(kind: type) -> Any:
    """Returns a stand-in for an object of this class, for messages."""
    attributes = {name: None for name in ("__array__", "__dataclass_fields__") if hasattr(kind, name)}
    return type(kind.__name__, (), attributes)()


def _insert_constants(spec: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns the captured tensors, with the constants that Dynamo has removed inserted at their positions."""
    if spec.masks_to_filter_const_values is None:
        return list(tensors)
    remaining = iter(tensors)
    return [
        constant if is_constant else next(remaining)
        for is_constant, constant in zip(spec.masks_to_filter_const_values, spec.const_values, strict=True)
    ]


def _find_callable(tx: Any, core: Any) -> Callable[..., Any] | None:
    """Returns an object with the signature of Dynamo's variable ``core``, or None if the signature is unknown."""
    from torch._dynamo import variables
    from torch._dynamo.variables.functions import FunctoolsPartialVariable

    if isinstance(core, variables.NNModuleVariable):
        return tx.output.get_submodule(core.module_key)  # type: ignore[no-any-return]
    if isinstance(core, variables.UserDefinedObjectVariable):  # modules, callables, bound methods
        return core.value if callable(core.value) else None
    if isinstance(core, FunctoolsPartialVariable):
        inner = _find_callable(tx, core.func)
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
