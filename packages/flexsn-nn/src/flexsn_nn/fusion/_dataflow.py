"""Finds the readers of the outputs of a network's layers."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from dis import get_instructions
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._over_time import OverTime
from flexsn_nn._stateful import Stateful
from flexsn_nn.layer import NormNeuron

_LAYERS = (OverTime, FlexSN, Stateful, NormNeuron)


class Use(NamedTuple):
    """A reader of a layer's output.

    Attributes:
        layer: name of a layer whose only input is this output; `None` for another kind of reader.
        text: description of the reader.
    """

    layer: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Uses of each layer's output, in all modules of the network whose `forward` can be traced.

    Attributes:
        calls: number of calls of each layer, by name.
        uses: readers of each layer's output in the last call of the layer.
        untraced: reasons why the `forward` of modules cannot be traced, by name of the module.
    """

    calls: Counter[str] = field(default_factory=Counter)
    uses: dict[str, list[Use]] = field(default_factory=dict)
    untraced: dict[str, str] = field(default_factory=dict)


def dataflow(net: nn.Module, *, training: bool) -> Dataflow:
    """Traces `net.forward` without data and without running a layer, on a copy of the network with shared parameters.

    Args:
        training: True for training mode, False for evaluation.
    """
    flow = Dataflow()
    twin = _copy_network(net, training, flow)
    if twin is not None:
        for root, graph in _trace_graphs("", twin, flow):
            _read(root, twin, graph, flow)
    return flow


def forward_graphs(net: nn.Module, *, training: bool) -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    """Yields the graphs of a network's modules: name of a module, copy of the network, graph of the module's `forward`.

    Args:
        training: True for training mode, False for evaluation.
    """
    flow = Dataflow()
    twin = _copy_network(net, training, flow)
    if twin is not None:
        for root, graph in _trace_graphs("", twin, flow):
            yield root, twin, graph


def _copy_network(net: nn.Module, training: bool, flow: Dataflow) -> nn.Module | None:
    """Copies a network without hooks and with shared tensors. On failure, returns `None` and records the reason."""
    shared_tensors = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    try:
        twin = copy.deepcopy(net, dict(shared_tensors))
    except Exception as error:  # copying a module can raise any error
        flow.untraced[""] = f"the network cannot be copied: {_get_first_line(error)}"
        return None
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return twin.train(training)


class _Proxy(fx.Proxy):
    """A proxy that `isinstance` recognizes as a tensor, but not as a parameter.

    Torch's C functions also check classes. If a proxy passed these checks, the functions would read its memory as that
    of a tensor, and the process would crash.
    """

    _is_param = _is_buffer = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame = sys._getframe(1)
        return Tensor if _calls_isinstance(frame.f_code, frame.f_lasti) else _Proxy


@lru_cache(maxsize=4096)
def _calls_isinstance(code: CodeType, offset: int) -> bool:
    """True if the instruction at this offset calls `isinstance` by name.

    In the source, such a call begins at the position of the instruction that loads the name.
    """
    if "isinstance" not in code.co_names:
        return False
    instructions = list(get_instructions(code))
    positions = {
        instruction.offset: (instruction.positions.lineno, instruction.positions.col_offset)
        for instruction in instructions
        if instruction.positions
    }
    call_position = positions.get(offset)
    if call_position is None or None in call_position:
        return False
    return any(
        instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and instruction.argval == "isinstance"
        and positions.get(instruction.offset) == call_position
        for instruction in instructions
    )


_SIZES = frozenset({"shape", "ndim", "size", "dim", "numel", "stride", "nelement"})


def _is_size(node: fx.Node) -> bool:
    """True for a node that is computed only from sizes."""
    if node.op == "call_method":
        return node.target in _SIZES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _SIZES
    inputs = node.all_input_nodes
    return bool(inputs) and all(map(_is_size, inputs))


class _Tracer(fx.Tracer):
    """Traces the code of the user's modules, and records calls of layers without tracing their code."""

    def __init__(self, closed: set[nn.Module]) -> None:
        super().__init__()
        self._leaves = closed

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, self) if _is_size(node) else _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._leaves or _is_layer(m)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, _LAYERS):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def _trace_graphs(name: str, module: nn.Module, flow: Dataflow) -> Iterator[tuple[str, fx.Graph]]:
    """Yields a module's name and the graph of its `forward`.

    If `forward` cannot be traced, yields the graphs of its submodules, and then a graph that calls the submodules.
    """
    if _is_layer(module):
        return
    try:
        yield name, _Tracer(set()).trace(module)
        return
    except Exception as error:  # code that does not support a proxy can raise any error
        reason = _get_first_line(error)
    children = [(child, part) for child, part in module.named_children() if not _is_layer(part)]
    for child, part in module.named_children():
        if not _is_layer(part):
            yield from _trace_graphs(f"{name}.{child}" if name else child, part, flow)
    try:
        if not children:
            raise RuntimeError(reason)
        yield name, _Tracer({part for _, part in children}).trace(module)
    except Exception as error:
        flow.untraced[name] = _get_first_line(error)


def _read(root: str, net: nn.Module, graph: fx.Graph, flow: Dataflow) -> None:
    canonical = {module: name for name, module in net.named_modules()}
    prefix = f"{root}." if root else ""

    def name_of(node: fx.Node) -> str:
        name: str = canonical[net.get_submodule(f"{prefix}{node.target}")]
        return name

    for node in graph.nodes:
        if node.op != "call_module":
            continue
        name = name_of(node)
        flow.calls[name] += 1
        flow.uses[name] = [
            Use(layer := name_of(user), layer) if _is_only_input(user, node) else Use(None, _describe(user))
            for user in node.users
        ]


def _is_only_input(user: fx.Node, node: fx.Node) -> bool:
    return user.op == "call_module" and bool(user.args) and user.args[0] is node and user.all_input_nodes == [node]


def _describe(user: fx.Node) -> str:
    if user.op == "output":
        return "the module's result"
    if user.op == "call_module":
        return f"{user.target}, among other arguments"
    target: Any = user.target
    return f"{getattr(target, '__name__', target)}()"


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
