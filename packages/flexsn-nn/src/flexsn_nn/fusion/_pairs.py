"""Pairs of a layer and the neuron after it, from the dataflow of a network."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flexsn_nn._checks import check_module, check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.fusion._dataflow import Dataflow, dataflow
from flexsn_nn.neuron import Neuron


class LeftError(Exception):
    """Raised with the reason why a layer is not fused."""


def trace_network(net: nn.Module, skip: Collection[str]) -> tuple[dict[str, nn.Module], list[Dataflow]]:
    """Returns the modules of a network by name, and its dataflow in training and in evaluation.

    Raises:
        UnknownNameError: `net` has no module with a name in `skip`.
    """
    check_module("net", net)
    modules = dict(net.named_modules())
    for name in skip:
        check_name("layer", name, modules)
    return modules, [dataflow(net, training=training) for training in (True, False)]


def find_neuron_after(layer_name: str, modules: dict[str, nn.Module], flows: list[Dataflow], *, owner: str) -> str:
    """Returns the name of the neuron that is the only reader of a layer's output.

    Args:
        layer_name: name of the layer.
        flows: dataflow in training and in evaluation.
        owner: words before the layer's name in messages; empty if messages are about the layer itself.

    Raises:
        LeftError: no neuron is the only reader of the output in both training and evaluation; the layer or the neuron
            is called several times; or no traced `forward` calls the layer.
    """
    names = {_find_only_reader(layer_name, modules, flow, owner) for flow in flows}
    if len(names) > 1:
        raise LeftError("in training, its output goes to another layer than in evaluation")
    return names.pop()


def why_not_into(neuron: FlexSN) -> str | None:
    """Returns the reason why a neuron cannot compute the layer before it; `None` if the neuron can."""
    kind = type(neuron)
    if kind.forward not in (FlexSN.forward, Neuron.forward):
        return f"{kind.__name__} overrides forward"
    if neuron._starts_by_input():
        return f"{kind.__name__} overrides init_states, which may read its input"
    if neuron._forward_pre_hooks:
        return "its neuron has a forward pre-hook, which would receive the input of the layer before it"
    return None


def _find_only_reader(layer_name: str, modules: dict[str, nn.Module], flow: Dataflow, owner: str) -> str:
    layer = f"{owner} {layer_name}" if owner else "it"
    if flow.calls[layer_name] > 1:
        raise LeftError(f"{layer} is called {flow.calls[layer_name]} times")
    if not flow.calls[layer_name]:
        enclosing = [name for name in flow.untraced if not name or layer_name.startswith(f"{name}.")]
        if not enclosing:
            raise LeftError(f"no traced forward calls {layer}")
        name = max(enclosing, key=len)
        raise LeftError(f"{name or 'the network'} cannot be traced: {flow.untraced[name]}")
    uses = flow.uses[layer_name]
    if len(uses) != 1:
        raise LeftError(f"its output goes to {len(uses)} readers: {', '.join(use.text for use in uses)}")
    ((neuron, text),) = uses
    if neuron is None or not isinstance(modules[neuron], FlexSN):
        raise LeftError(f"its output goes to {text}, which is not a neuron")
    if flow.calls[neuron] > 1:
        raise LeftError(f"its neuron {neuron} is called {flow.calls[neuron]} times")
    return neuron
