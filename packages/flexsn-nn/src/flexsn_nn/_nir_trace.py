"""Represents a network as calls of layers and sums of outputs, for exchange formats without other operations."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._over_time import OverTime
from flexsn_nn._scale import Scale
from flexsn_nn._stateful import Stateful
from flexsn_nn.errors import NirError
from flexsn_nn.functional import get_states, reset_net, set_states
from flexsn_nn.layer import NormNeuron

INPUT = "input"
_SUMS = (operator.add, operator.iadd, torch.add)
_PRODUCTS = (operator.mul, operator.imul, torch.mul)
_COPIES = ("contiguous", "clone")


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        name: unique name. A module that is called once keeps its name in the network.
        layer: module that is recorded as a whole, without its children.
        sources: names of the calls whose outputs are added to form the input of this call. `INPUT` is the network's
            input.
        shape: shape of the input, without time and batch.
        folded: True if time and batch are one dimension of the input, as inside of `OverTime`.
    """

    name: str
    layer: nn.Module
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    folded: bool


def calls_of(net: nn.Module, sample: Tensor) -> tuple[list[Call], tuple[str, ...], tuple[int, ...]]:
    """Returns the calls in order, the sources of the output, and the output's shape without time and batch.

    Traces the `forward` of modules that belong neither to PyTorch nor to this package. Such a `forward` may call
    layers, add their outputs, multiply them by constants and flatten them.

    Raises:
        NirError: a `forward` cannot be traced or contains another operation, a layer with a state is called twice, or
            the network has several inputs or outputs.
    """
    root = nn.Sequential()
    root.add_module(type(net).__name__, net)  # makes the call of a single layer visible
    tracer = _Tracer()
    try:
        graph = tracer.trace(root)
    except NirError:
        raise
    except Exception as error:  # forward receives proxies, so it may raise any error
        raise NirError(
            f"forward of {type(net).__name__} cannot be traced by torch.fx: {error}. It may call layers, add their "
            "outputs, multiply them by constants and flatten them, without conditions on values."
        ) from error
    _check_places(root, graph)
    runner = _Runner(fx.GraphModule(root, graph))
    states = get_states(net)
    try:
        with torch.no_grad(), ExitStack() as stack:
            for module in root.modules():
                stack.callback(module.register_forward_pre_hook(runner.look).remove)
            reset_net(net)
            output = runner.run(sample)
    finally:
        set_states(net, states)
    calls, last = _Reader(root, runner).read(graph)
    return calls, last, tuple(output.shape[2:])


def flat(module: nn.Module, name: str, folded: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields `(name, layer, folded)` for each layer of a chain, in order."""
    if type(module) is NormNeuron:
        yield from flat(module.norm, f"{name}.norm", True)
        yield from flat(module.neuron, f"{name}.neuron", folded)
    elif type(module) is nn.Sequential or isinstance(module, OverTime):
        is_folded = folded or isinstance(module, OverTime)
        for child_name, child in module.named_children():
            yield from flat(child, f"{name}.{child_name}", is_folded)
    else:
        yield name, module, folded


def _check_places(root: nn.Module, graph: fx.Graph) -> None:
    """Raises `NirError` if a layer with a state is called twice."""
    stateful: set[nn.Module] = set()
    for node in graph.nodes:
        if node.op == "call_module":
            for name, layer, _ in flat(root.get_submodule(str(node.target)), str(node.target)):
                if layer in stateful:
                    raise NirError(f"{name} is called twice: both calls would share its state.")
                if isinstance(layer, FlexSN | Stateful):
                    stateful.add(layer)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_layer = isinstance(m, FlexSN | Stateful | OverTime | Scale | NormNeuron)
        return is_layer or super().is_leaf_module(m, module_qualified_name)


class _Runner(fx.Interpreter):
    """Interpreter that runs a graph, and records the shapes of all values and of the layers' inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, tuple[int, ...]] = {}
        self.inputs: dict[int, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.values[n.name] = tuple(result.shape)
        return result

    def look(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            self.inputs[id(layer)] = tuple(inputs[0].shape)


class _Reader:
    """Converter from a graph of torch.fx to calls."""

    def __init__(self, root: nn.Module, runner: _Runner) -> None:
        self._root = root
        self._runner = runner
        self._calls: list[Call] = []
        self._values: dict[str, tuple[str, ...]] = {}
        self._names: set[str] = set()

    def read(self, graph: fx.Graph) -> tuple[list[Call], tuple[str, ...]]:
        for node in graph.nodes:
            if node.op == "placeholder":
                if self._values:
                    raise NirError(f"{node.name} is a second input of the network; this export supports one input.")
                self._values[node.name] = (INPUT,)
            elif node.op == "call_module":
                self._values[node.name] = self._read_module(node)
            elif node.op in ("call_function", "call_method"):
                self._values[node.name] = self._read_operation(node)
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise NirError("the network returns several values; this export supports one output.")
                return self._calls, self._find_sources(node.args[0], node)
        raise AssertionError("a graph ends with an output")

    def _find_sources(self, value: Any, node: fx.Node) -> tuple[str, ...]:
        if not isinstance(value, fx.Node) or value.name not in self._values:
            raise _make_error(node, f"takes {value!r}, which is not the output of a layer")
        return self._values[value.name]

    def _read_module(self, node: fx.Node) -> tuple[str, ...]:
        assert isinstance(node.target, str)
        if len(node.args) != 1 or node.kwargs:
            raise _make_error(node, "is called with more than one input")
        module = self._root.get_submodule(node.target)
        sources = self._find_sources(node.args[0], node)
        shape_of_module = self._runner.inputs[id(module)][2:]
        for name, layer, folded in flat(module, node.target):
            # The norm of a NormNeuron is never called, since the neuron's step computes the norm.
            shape_of_input = self._runner.inputs.get(id(layer))
            shape = shape_of_module if shape_of_input is None else shape_of_input[1 if folded else 2 :]
            sources = self._add(name, layer, sources, shape, folded)
        return sources

    def _read_operation(self, node: fx.Node) -> tuple[str, ...]:
        target, args = node.target, node.args
        first = args[0] if args else None
        if target in _COPIES:
            return self._find_sources(first, node)
        if target in _SUMS or target in ("add", "add_"):
            if len(args) != 2 or node.kwargs:
                raise _make_error(node, "adds with a factor")
            return self._find_sources(first, node) + self._find_sources(args[1], node)
        if target in _PRODUCTS or target in ("mul", "mul_"):
            value, constant = (first, args[1]) if self._read_constant(args[1]) is not None else (args[1], first)
            scale = self._read_constant(constant)
            if scale is None:
                raise _make_error(node, "multiplies two outputs")
            return self._add_operation(node, Scale(scale), self._find_sources(value, node), value)
        if target in (torch.flatten, "flatten"):
            dims: dict[str, Any] = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | dict(node.kwargs)
            layer = nn.Flatten(dims.get("start_dim", 0), dims.get("end_dim", -1))
            return self._add_operation(node, layer, self._find_sources(first, node), first)
        raise _make_error(node, "is not supported")

    def _add_operation(self, node: fx.Node, layer: nn.Module, sources: tuple[str, ...], value: Any) -> tuple[str, ...]:
        return self._add(node.name, layer, sources, self._runner.values[value.name][2:], folded=False)

    def _read_constant(self, value: Any) -> Tensor | None:
        if isinstance(value, int | float):
            return torch.tensor(float(value))
        if isinstance(value, fx.Node) and value.op == "get_attr":
            attribute = operator.attrgetter(str(value.target))(self._root)
            return attribute.detach() if isinstance(attribute, Tensor) else None
        return None

    def _add(
        self, name: str, layer: nn.Module, sources: tuple[str, ...], shape: tuple[int, ...], folded: bool
    ) -> tuple[str, ...]:
        if name in self._names:
            name = f"{name}_{len(self._calls)}"
        self._names.add(name)
        self._calls.append(Call(name, layer, sources, shape, folded))
        return (name,)


def _make_error(node: fx.Node, reason: str) -> NirError:
    target = getattr(node.target, "__name__", node.target)
    return NirError(
        f"{node.name} ({target}) {reason}: NIR has layers, sums of their outputs and products with constants."
    )
