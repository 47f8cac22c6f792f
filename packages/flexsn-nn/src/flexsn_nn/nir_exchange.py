"""Imports and exports NIR, the exchange format of spiking networks. Requires `pip install flexsn-nn[nir]`.

NIR's neurons are differential equations. Here, one step is one Euler step of `dt` seconds of these equations:

    LIF      tau v' = v_leak - v + r x             tau in seconds; v > v_threshold: v = v_reset
    IF       v' = r x
    LI       tau v' = v_leak - v + r x
    CubaLIF  tau_syn i' = -i + w_in x;  tau_mem v' = v_leak - v + r i, with the new i

If NIR cannot express a network, or layers cannot express a graph, the functions raise an error. Networks consist of
layers on sequences `[T, B, ...]` and sums of their outputs. A neuron with recurrent weights is a separate graph inside
of the network's graph. This inner graph contains the neuron, and a linear node from the neuron's output to its input.
The neuron receives the output of this linear node one step later.

Source: Pedersen et al., "Neuromorphic intermediate representation", Nature Communications 2024.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_number
from flexsn_nn._delay import Delay
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._nir_graph import LayerGraph
from flexsn_nn._nir_trace import INPUT, Call, calls_of
from flexsn_nn._over_time import OverTime
from flexsn_nn._scale import Scale
from flexsn_nn.errors import MissingExtraError, NirError
from flexsn_nn.layer import SharedDropout
from flexsn_nn.neuron import CUBALIF, IF, LI, LIF, PLIF, RLIF, Feedback, ImmediateReset, Leaky, Recurrent, Synaptic
from flexsn_nn.neuron._connections import OneToOne
from flexsn_nn.surrogate import Surrogate

__all__ = ["Scale", "from_nir", "to_nir"]


def to_nir(
    net: nn.Module, sample: Tensor, *, dt: float = 1e-4, ignore_equality: bool = False, soft_reset: bool = False
) -> Any:
    """Exports a network as a `nir.NIRGraph`.

    Args:
        net: a layer, or any nesting of layers, `nn.Sequential`, `OverTime`, blocks such as `SEWBlock`, and modules with
            their own `forward`. `torch.fx` traces each `forward`, which may call layers, add their outputs, multiply
            them by constants, and flatten them. Supported layers are `nn.Linear`, `nn.Conv1d`, `nn.Conv2d`,
            `nn.AvgPool2d`, batch norms in evaluation (which are folded into the weights before them, or become a layer
            that scales and shifts), dropout in evaluation and `nn.Identity` (which are left out), `nn.Flatten` from a
            dimension after time and batch to the last dimension, `Scale`, `layer.Delay`, `IF`, `LIF`, `PLIF`,
            `CUBALIF`, `LI`, `Leaky` that resets to zero, and `Synaptic` that resets to zero in the same step; also
            `Recurrent` around these neurons, `RLIF`, and `RLeaky` and `RSynaptic` that reset to zero in the same step.
        sample: input `[T, B, ...]`. The network runs once with this input, to find the shapes.
        dt: duration of one step in seconds.
        ignore_equality: True to also export neurons that fire if `v >= v_threshold`, although NIR's neurons fire if
            `v > v_threshold`. False to raise an error for such neurons.
        soft_reset: True if the simulator that will read the graph resets by subtracting the threshold, which NIR's
            equations cannot express. In this case, only neurons with `v_reset=None` can be exported, and their metadata
            contain `"reset": "subtract"`. `from_nir` reads these metadata.

    Raises:
        NirError: NIR cannot express a layer. The message gives advice.
        MissingExtraError: the package `nir` is not installed.
    """
    nir = _import_nir()
    check_number("dt", dt, above=0)
    return _to_graph(nir, net, sample, _ExportOptions(dt, ignore_equality, soft_reset))


def from_nir(graph: Any, *, dt: float = 1e-4, backend: str = "auto") -> nn.Sequential:
    """Imports a network from a `nir.NIRGraph`.

    A loop in the graph must lead from a neuron through a linear node back to the same neuron. A recurrent neuron may
    also be a graph inside of the graph. Layers have the names of the graph's nodes, with `_` instead of dots.

    To read a file that contains a convolution with a kernel that is not square, nir 1.0.8 needs
    `nir.read(path, type_check=False)`.

    Neurons fire if `v > v_threshold`, as in NIR, and have their default surrogate.

    Args:
        graph: graph, for example from `nir.read(path)`.
        dt: duration of one step in seconds.
        backend: backend of the neurons, same as in `FlexSN`.

    Returns:
        A sequence of layers. If outputs are forked and summed, the sequence contains a single layer, named `graph`. The
        network maps sequences `[T, B, ...]` to sequences.

    Raises:
        NirError: the graph has another loop, several inputs or outputs, or a node that no layer can express.
        MissingExtraError: the package `nir` is not installed.
    """
    nir = _import_nir()
    check_number("dt", dt, above=0)
    return _from_graph(nir, graph, dt, backend)


# -- to NIR ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ExportOptions:
    """Options of `to_nir`, for the export of neurons."""

    dt: float
    ignore_equality: bool
    soft_reset: bool


class _Builder:
    """Collection of nodes by name, and of edges.

    The name of a node is its class in lower case. The second and later nodes of a class also have a number.
    """

    def __init__(self, nir: Any) -> None:
        self.nir = nir
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self._outputs: dict[str, str] = {}  # maps the name of a call to the name of the node with the call's output
        self._counts: dict[str, int] = {}

    def add(self, node: Any, sources: Sequence[str]) -> str:
        """Adds a node with edges from its sources. Returns the node's name."""
        kind = type(node).__name__.lower()
        count = self._counts[kind] = self._counts.get(kind, -1) + 1
        name = f"{kind}_{count}" if count else kind
        self.nodes[name] = node
        self.connect(sources, name)
        return name

    def connect(self, sources: Sequence[str], target: str) -> None:
        """Adds edges from several nodes to one node."""
        for source in dict.fromkeys(sources):
            count = sources.count(source)
            if count > 1:
                raise NirError(f"{target} gets the same output {count} times: multiply it by {count} instead.")
            self.edges.append((source, target))

    def record_call(self, name: str, node: str) -> None:
        """Records the name of the node that has the output of a call."""
        self._outputs[name] = node

    def outputs(self, names: Sequence[str]) -> list[str]:
        """Returns the names of the nodes that have the outputs of these calls."""
        return [self._outputs[name] for name in names]


def _to_graph(nir: Any, net: nn.Module, sample: Tensor, options: _ExportOptions) -> Any:
    calls, last, shape = calls_of(net, sample)
    consumers = Counter(source for call in calls for source in call.sources) + Counter(last)
    builder = _Builder(nir)
    builder.record_call(INPUT, builder.add(nir.Input({"input": _to_sizes(sample.shape[2:])}), []))
    node_of_call: dict[str, str] = {}  # maps the name of a call to the name of the node that was created for the call
    for call in calls:
        sources = builder.outputs(call.sources)
        if isinstance(call.layer, nn.modules.batchnorm._BatchNorm):
            before = (
                node_of_call.get(call.sources[0])
                if len(call.sources) == 1 and consumers[call.sources[0]] == 1
                else None
            )
            node = _norm_to_nodes(builder, call, before, sources)
        elif _has_no_effect(call):
            if len(sources) > 1:
                raise NirError(f"{call.name} ({type(call.layer).__name__}) receives a sum: remove this layer.")
            (node,) = sources
        else:
            node = builder.add(_to_node(nir, call.name, call.layer, call.shape, options), sources)
            node_of_call[call.name] = node
        builder.record_call(call.name, node)
    builder.add(nir.Output({"output": _to_sizes(shape)}), builder.outputs(last))
    # The type check is off, because the check of nir 1.0 mistakes a kernel [3, 1] for [3, 3]. The shapes were recorded
    # in a run of the network instead.
    return nir.NIRGraph(nodes=builder.nodes, edges=builder.edges, type_check=False)


def _has_no_effect(call: Call) -> bool:
    """True for layers that have no effect in evaluation. Raises `NirError` for dropout in training."""
    if isinstance(call.layer, nn.Identity):
        return True
    if not isinstance(call.layer, nn.modules.dropout._DropoutNd | SharedDropout):
        return False
    if call.layer.training:
        raise NirError(f"{call.name} drops outputs at random in training; NIR has no dropout: call net.eval() first.")
    return True


def _norm_to_nodes(builder: _Builder, call: Call, before: str | None, sources: Sequence[str]) -> str:
    """Exports a batch norm in evaluation: folds the norm into the weights before it, or adds a layer in its place.

    The added layer scales and shifts the norm's input.

    Returns the name of the node that has the norm's output.
    """
    norm, nir = call.layer, builder.nir
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        raise NirError(
            f"{call.name} normalises by statistics of the batch; NIR's weights are constants: call net.eval() first."
        )
    if not call.folded:
        raise NirError(f"{call.name} is a batch norm on [T, B, ...]: put it into OverTime, so that C is dimension 1.")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    shift = shift if norm.bias is None else shift + norm.bias.detach().double()
    scale, shift = scale.cpu(), shift.cpu()
    node = builder.nodes.get(before) if before is not None else None
    kind = type(node).__name__
    if before is not None and node is not None and kind in ("Linear", "Affine", "Conv1d", "Conv2d"):
        weight = _to_double(node.weight)
        folded = _to_array((weight * scale.view(-1, *[1] * (weight.dim() - 1))).float())
        bias = _to_array((shift if kind == "Linear" else _to_double(node.bias) * scale + shift).float())
        if kind == "Linear":
            builder.nodes[before] = nir.Affine(weight=folded, bias=bias)
        else:
            node.weight, node.bias = folded, bias
        return before
    bias = _to_array(shift.float())
    if len(call.shape) == 1:
        return builder.add(nir.Affine(weight=_to_array(scale.diag().float()), bias=bias), sources)
    if len(call.shape) not in (2, 3):
        raise NirError(f"{call.name} normalises steps of {len(call.shape)} dimensions; NIR's layers have up to three.")
    is_1d = len(call.shape) == 2
    new_node = (nir.Conv1d if is_1d else nir.Conv2d)(
        input_shape=call.shape[1] if is_1d else call.shape[1:],
        weight=_to_array(scale.float().view(-1, 1, *[1] * (len(call.shape) - 1))),
        stride=1,
        padding=0,
        dilation=1,
        groups=len(scale),
        bias=bias,
    )
    return builder.add(new_node, sources)


def _to_sizes(shape: Sequence[int]) -> Any:
    return torch.tensor(list(shape)).numpy()


def _to_node(nir: Any, name: str, layer: nn.Module, shape: tuple[int, ...], options: _ExportOptions) -> Any:
    if isinstance(layer, Feedback):
        return _recurrent_to_node(nir, name, layer, shape, options)
    if isinstance(layer, FlexSN):
        return _neuron_to_node(nir, name, layer, shape, options)
    if isinstance(layer, nn.Linear):
        return _linear_to_node(nir, name, layer, shape)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return _conv_to_node(nir, name, layer, shape)
    if isinstance(layer, nn.Flatten):
        leading = shape[: layer.start_dim - 2] if layer.start_dim >= 2 else None
        if leading is None or layer.end_dim not in (-1, len(shape) + 1):
            raise NirError(
                f"{name} flattens dimensions {layer.start_dim} to {layer.end_dim} of [T, B, ...]: use "
                "nn.Flatten(2), which does not flatten time and batch."
            )
        return nir.Flatten({"input": list(shape)}, start_dim=len(leading), end_dim=len(shape) - 1)
    if isinstance(layer, nn.AvgPool2d):
        return _pool_to_node(nir, name, layer)
    if isinstance(layer, Scale):
        return nir.Scale(scale=_expand_values(layer.scale, shape, name))
    if isinstance(layer, Delay):
        return nir.Delay(delay=_expand_values(layer.in_evaluation(), shape, name) * options.dt)
    raise NirError(
        f"{name} is a {type(layer).__name__}, which NIR or this export does not support. Supported: nn.Linear, "
        "nn.Conv1d, nn.Conv2d, nn.AvgPool2d, batch norms, nn.Flatten, Scale, Delay, IF, LIF, PLIF, CUBALIF, LI, Leaky, "
        "Synaptic, Recurrent, RLIF, RLeaky, RSynaptic."
    )


def _linear_to_node(nir: Any, name: str, layer: nn.Linear, shape: tuple[int, ...]) -> Any:
    if len(shape) != 1:
        raise NirError(
            f"{name} is an nn.Linear on {list(shape)}; NIR's linear layer takes vectors: apply nn.Flatten(2) first."
        )
    if layer.bias is None:
        return nir.Linear(weight=_to_array(layer.weight))
    return nir.Affine(weight=_to_array(layer.weight), bias=_to_array(layer.bias))


def _recurrent_to_node(nir: Any, name: str, layer: Feedback, shape: tuple[int, ...], options: _ExportOptions) -> Any:
    """Creates a graph of a neuron and its recurrent weights, as snnTorch does.

    Weights with one value per neuron become a diagonal matrix.
    """
    neuron: FlexSN = layer.neuron if type(layer) is Recurrent else layer
    if isinstance(layer, Recurrent) and layer.delay is not None:
        raise NirError(f"{name} has delays in its feedback; this export supports only those of layer.Delay.")
    if isinstance(layer.recurrent, nn.Linear):
        weights = _linear_to_node(nir, name, layer.recurrent, shape)
    elif isinstance(layer.recurrent, OneToOne) and len(shape) == 1:
        weights = nir.Linear(weight=_to_array(layer.recurrent.V.expand(shape).diag()))
    else:
        raise NirError(
            f"{name} feeds its spikes back through a {type(layer.recurrent).__name__} on {list(shape)}; NIR and this "
            "export only support a matrix that multiplies vectors."
        )
    nodes = {
        "input": nir.Input({"input": list(shape)}),
        "neuron": _neuron_to_node(nir, name, neuron, shape, options),
        "w_rec": weights,
        "output": nir.Output({"output": list(shape)}),
    }
    edges = [("input", "neuron"), ("neuron", "w_rec"), ("w_rec", "neuron"), ("neuron", "output")]
    return nir.NIRGraph(nodes=nodes, edges=edges, type_check=False)


def _conv_to_node(nir: Any, name: str, layer: nn.Conv1d | nn.Conv2d, shape: tuple[int, ...]) -> Any:
    if layer.padding_mode != "zeros":
        raise NirError(f"{name} pads with {layer.padding_mode!r}; NIR's convolutions pad with zeros.")
    bias = layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
    is_1d = isinstance(layer, nn.Conv1d)
    sizes = {
        key: value[0] if is_1d and isinstance(value, tuple) else value
        for key, value in (
            ("stride", layer.stride),
            ("padding", layer.padding),
            ("dilation", layer.dilation),
        )
    }
    return (nir.Conv1d if is_1d else nir.Conv2d)(
        input_shape=shape[1] if is_1d else shape[1:],
        weight=_to_array(layer.weight),
        groups=layer.groups,
        bias=_to_array(bias),
        **sizes,
    )


def _to_pair(value: Any) -> tuple[int, int]:
    """Returns height and width from one number for both, or from two numbers."""
    first, *others = torch.as_tensor(value).flatten().tolist()
    return int(first), int(others[0] if others else first)


def _pool_to_node(nir: Any, name: str, layer: nn.AvgPool2d) -> Any:
    """Exports average pooling, or sum pooling for `divisor_override=1`."""
    has_padding = any(_to_pair(layer.padding))
    if layer.ceil_mode or (has_padding and not layer.count_include_pad and layer.divisor_override is None):
        raise NirError(f"{name} has ceil_mode=True or count_include_pad=False, which NIR's pooling does not have.")
    if layer.divisor_override not in (None, 1):
        raise NirError(f"{name} has divisor_override={layer.divisor_override}; NIR has averages (None) and sums (1).")
    sizes = {
        key: _to_sizes(_to_pair(value))
        for key, value in (("kernel_size", layer.kernel_size), ("stride", layer.stride), ("padding", layer.padding))
    }
    return (nir.AvgPool2d if layer.divisor_override is None else nir.SumPool2d)(**sizes)


def _neuron_to_node(nir: Any, name: str, neuron: FlexSN, shape: tuple[int, ...], options: _ExportOptions) -> Any:
    dt, ignore_equality = options.dt, options.ignore_equality

    def array(value: float | Tensor) -> Any:
        return _expand_values(value, shape, name)

    if isinstance(neuron, LI):
        tau = array(neuron.tau)
        return nir.LI(tau=tau * dt, r=tau**0 if neuron.decay_input else tau, v_leak=array(0.0))
    if isinstance(neuron, Leaky | Synaptic):
        if options.soft_reset:
            raise NirError(f"{name} is a {type(neuron).__name__}; with soft_reset=True, give IF, LIF, PLIF or CUBALIF.")
        _check_delayed(name, neuron)
        _check_strict(name, neuron.spike_grad, ignore_equality)
        steps = _compute_time_constant(name, "beta", array(neuron.beta))
        if isinstance(neuron, Synaptic):
            synapse = _compute_time_constant(name, "alpha", array(neuron.alpha))
            return nir.CubaLIF(
                tau_syn=synapse * dt,
                tau_mem=steps * dt,
                r=steps,
                v_leak=array(0.0),
                w_in=synapse,
                v_threshold=array(neuron.threshold),
                v_reset=array(0.0),
            )
        return nir.LIF(
            tau=steps * dt,
            r=steps,
            v_leak=array(0.0),
            v_threshold=array(neuron.threshold),
            v_reset=array(0.0),
        )
    if type(neuron) not in (IF, LIF, PLIF, CUBALIF, RLIF):
        raise NirError(f"{name} is a {type(neuron).__name__}, which NIR does not have.")
    assert isinstance(neuron, ImmediateReset)
    if (neuron.v_reset is None) != options.soft_reset:
        raise NirError(
            f"{name} resets to v_reset={neuron.v_reset}; a simulator that resets by subtraction cannot do this: train "
            "with v_reset=None, or leave soft_reset=True out."
            if options.soft_reset
            else f"{name} resets softly, by subtraction; NIR's neurons are set to v_reset. Train with v_reset=0.0, or, "
            "for a simulator that resets by subtraction, pass soft_reset=True."
        )
    _check_strict(name, neuron.surrogate_function, ignore_equality)
    v_reset = 0.0 if neuron.v_reset is None else neuron.v_reset
    threshold_and_reset = {"v_threshold": array(neuron.v_threshold), "v_reset": array(v_reset)}
    if options.soft_reset:
        threshold_and_reset["metadata"] = {"reset": "subtract"}
    if isinstance(neuron, IF):
        return nir.IF(r=array(1 / dt), **threshold_and_reset)
    if isinstance(neuron, CUBALIF):
        if v_reset != 0:
            raise NirError(f"{name} starts at v_reset={neuron.v_reset} and leaks to 0: NIR has no such start.")
        synapse = _compute_time_constant(name, "c_decay", array(neuron.c_decay))
        membrane = _compute_time_constant(name, "v_decay", array(neuron.v_decay))
        return nir.CubaLIF(
            tau_syn=synapse * dt,
            tau_mem=membrane * dt,
            r=membrane,
            v_leak=array(0.0),
            w_in=synapse,
            **threshold_and_reset,
        )
    assert isinstance(neuron, LIF | PLIF)
    tau = array(neuron.tau)
    r = tau**0 if neuron.decay_input else tau
    return nir.LIF(tau=tau * dt, r=r, v_leak=array(neuron.v_start), **threshold_and_reset)


def _check_delayed(name: str, neuron: Leaky | Synaptic) -> None:
    if neuron.reset_mechanism != "zero":
        raise NirError(
            f"{name} has reset_mechanism={neuron.reset_mechanism!r}; NIR's neurons are set to v_reset: "
            "train with reset_mechanism='zero'."
        )
    if neuron.reset_delay and type(neuron) is not Leaky:
        raise NirError(
            f"{name} is a {type(neuron).__name__} that resets in the next step, together with the input of that "
            "step. In NIR, neurons reset in the same step: train with reset_delay=False."
        )


def _check_strict(name: str, function: object, ignore_equality: bool) -> None:
    if not ignore_equality and not (isinstance(function, Surrogate) and function.strict):
        raise NirError(
            f"{name} fires at v >= v_threshold, NIR at v > v_threshold: they differ where the membrane is "
            "exactly at the threshold. Create the neuron with strict=True, or pass ignore_equality=True."
        )


def _compute_time_constant(name: str, parameter: str, decay: Any) -> Any:
    """Returns the time constant in steps for which an Euler step without input multiplies a state by `decay`."""
    if not (decay < 1).all():
        raise NirError(f"{name} has {parameter}=1: it never decays, and NIR has no infinite time constant.")
    return 1 / (1 - decay)


def _to_array(value: Tensor) -> Any:
    return value.detach().cpu().numpy()


def _expand_values(value: float | Tensor, shape: tuple[int, ...], name: str) -> Any:
    """Expands a parameter to one value per neuron, in float64, so that conversion to seconds and back is exact."""
    tensor = torch.as_tensor(value).detach().cpu().double()
    try:
        return tensor.expand(shape).contiguous().numpy()
    except RuntimeError as error:
        raise NirError(
            f"{name} has a parameter of shape {list(tensor.shape)} for neurons of shape {list(shape)}: NIR "
            "has parameters per neuron, not per sample."
        ) from error


# -- from NIR --------------------------------------------------------------------------------------------


def _from_graph(nir: Any, graph: Any, dt: float, backend: str) -> nn.Sequential:
    edges, loops = _separate_loops(graph)
    order, sources, output = _order(nir, graph, edges)
    layers: dict[str, nn.Module] = {}
    # In the name of a submodule, a dot would separate the parts of a path.
    names = {name: name.replace(".", "_") for name in order}
    for name in order:
        node, weights = graph.nodes[name], loops.get(name)
        if isinstance(node, nir.NIRGraph):
            inner = _from_graph(nir, node, dt, backend)
            layer = inner[0] if len(inner) == 1 else inner
        else:
            layer = _from_node(name, node, dt, backend)
        layers[names[name]] = layer if weights is None else _recurrent_from_node(name, layer, weights)
    chain = [sources[name] for name in order] + [output]
    net = nn.Sequential()
    if chain == [[before] for before in ["", *order]]:
        for name, layer in layers.items():
            net.add_module(name, layer)
        return net
    named = {names[name]: [names.get(source, "") for source in sources[name]] for name in order}
    net.add_module("graph", LayerGraph(layers, named, [names.get(source, "") for source in output]))
    return net


def _recurrent_from_node(name: str, layer: nn.Module, node: Any) -> nn.Module:
    """Creates a recurrent neuron with weights from its output to its input.

    A gain before the neuron applies to its input and to its feedback.
    """
    gain: Tensor | None = None
    if isinstance(layer, nn.Sequential) and len(layer) == 2 and isinstance(layer[0], Scale):
        gain, layer = layer[0].scale, layer[1]
    if not isinstance(layer, FlexSN):
        raise NirError(f"{name} has weights from its output to its input, but is not a neuron.")
    bias = _to_double(node.bias) if type(node).__name__ == "Affine" else None
    weight = _to_double(node.scale) if type(node).__name__ == "Scale" else _to_double(node.weight)
    if weight.dim() > 2 or weight.shape[0] != weight.shape[-1]:
        raise NirError(f"{name} has recurrent weights of shape {list(weight.shape)}; only square matrices can be read.")
    if gain is not None:
        weight = weight * (gain.double().unsqueeze(-1) if gain.dim() and weight.dim() == 2 else gain.double())
        bias = None if bias is None else bias * gain.double()
    is_diagonal = weight.dim() == 1 or (bias is None and torch.equal(weight, weight.diag().diag()))
    if is_diagonal:
        V = (weight if weight.dim() == 1 else weight.diag()).float()
        recurrent = Recurrent(layer, all_to_all=False, V=V)
    else:
        recurrent = Recurrent(layer, len(weight), bias=bias is not None)
        _fill(recurrent.recurrent, weight, bias)
    return recurrent if gain is None else nn.Sequential(Scale(gain), recurrent)


def _separate_loops(graph: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Returns the edges without those of recurrent weights, and the nodes of these weights by name of the neuron."""
    edges = [tuple(edge) for edge in graph.edges]
    loops: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        neighbors = {source for source, target in edges if target == name}
        if neighbors == {target for source, target in edges if source == name} and len(neighbors) == 1:
            (neuron,) = neighbors
            if type(node).__name__ not in ("Linear", "Affine", "Scale") or neuron in loops or neuron == name:
                raise NirError(f"{name} leads back to its source, {neuron!r}: only one linear node may do this.")
            loops[neuron] = node
            edges = [edge for edge in edges if name not in edge]
    return [(source, target) for source, target in edges], loops


def _order(nir: Any, graph: Any, edges: list[tuple[str, str]]) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Orders the nodes from the input to the output.

    Returns three values: the names of the nodes, where each name follows its sources; the sources of each node, with
    `""` for the input; and the sources of the output.
    """
    ends: dict[str, list[str]] = {"input": [], "output": []}
    for name, node in graph.nodes.items():
        if isinstance(node, nir.Input):
            ends["input"].append(name)
        elif isinstance(node, nir.Output):
            ends["output"].append(name)
    for end, names_of_ends in ends.items():
        if len(names_of_ends) != 1:
            raise NirError(f"the graph has {len(names_of_ends)} {end}s; only graphs with one can be read.")
    (first,), (last,) = ends.values()
    sources: dict[str, list[str]] = {}
    for source, target in edges:
        sources.setdefault(target, []).append(source)
    if last not in sources:
        raise NirError("nothing leads to the output.")
    order: dict[str, None] = {}
    pending: list[tuple[str, bool]] = [(last, False)]
    active: set[str] = set()
    while pending:  # depth-first search
        name, is_finished = pending.pop()
        if is_finished:
            active.discard(name)
            order[name] = None
        elif name not in order:
            if name in active:
                raise NirError("the graph has a loop other than recurrent weights around one neuron.")
            if name not in sources and name != first:
                raise NirError(f"nothing leads to the node {name!r}.")
            active.add(name)
            pending.append((name, True))
            for source in reversed(sources.get(name, [])):
                if source in active:
                    raise NirError("the graph has a loop other than recurrent weights around one neuron.")
                pending.append((source, False))
    names = [name for name in order if name not in (first, last)]
    named = {name: ["" if s == first else s for s in sources.get(name, [])] for name in (*names, last)}
    return names, named, named[last]


def _from_node(name: str, node: Any, dt: float, backend: str) -> nn.Module:
    kind = type(node).__name__
    if kind in ("Linear", "Affine"):
        weight = _to_tensor(node.weight)
        if weight.dim() != 2:
            raise NirError(f"{name} has a weight of shape {list(weight.shape)}; only matrices can be read.")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=kind == "Affine")
        return _fill(layer, weight, _to_tensor(node.bias) if kind == "Affine" else None)
    if kind in ("Conv1d", "Conv2d"):
        return OverTime(_conv_from_node(node, kind))
    if kind in ("AvgPool2d", "SumPool2d"):
        size, stride, padding = (_to_pair(value) for value in (node.kernel_size, node.stride, node.padding))
        return OverTime(nn.AvgPool2d(size, stride, padding, divisor_override=None if kind == "AvgPool2d" else 1))
    if kind == "Flatten":
        if node.start_dim < 0 or node.end_dim not in (-1, len(node.input_type["input"]) - 1):
            raise NirError(
                f"{name} flattens {node.start_dim} to {node.end_dim}; only flattening up to the last is supported."
            )
        return nn.Flatten(node.start_dim + 2)
    if kind == "Scale":
        return Scale(_to_tensor(node.scale))
    if kind == "Delay":
        return Delay(_compact(_convert_delays(name, node.delay, dt)))
    if kind == "LI":
        tau, gain = _convert_charge(name, node.tau, node.r, dt)
        _check_value(name, "v_leak", node.v_leak, 0.0, "A leaky integrator leaks to 0.")
        if gain is None:
            return LI(tau, decay_input=False, backend=backend)
        return _scale_input(gain, LI(tau, backend=backend))
    if kind in ("IF", "LIF", "CubaLIF"):
        return _spiking_from_node(name, node, dt, backend)
    raise NirError(
        f"{name} is a {kind}, which cannot be read. Supported: Linear, Affine, Conv1d, Conv2d, AvgPool2d, "
        "SumPool2d, Flatten, Scale, Delay, IF, LIF, CubaLIF, LI, and graphs of these."
    )


def _convert_delays(name: str, seconds: Any, dt: float) -> Tensor:
    """Converts delays to steps. Rounds a delay that differs from a whole number only by the error of the division."""
    steps = _to_double(seconds) / dt
    if not bool((steps >= 0).all()):
        raise NirError(f"{name} has a delay of {float(steps.min() * dt):g} s; a delay is at least 0.")
    return torch.where((steps - steps.round()).abs() < 1e-6, steps.round(), steps).float()


def _conv_from_node(node: Any, kind: str) -> nn.Module:
    weight = _to_tensor(node.weight)
    make: Any = nn.Conv1d if kind == "Conv1d" else nn.Conv2d
    layer: nn.Module = make(
        weight.shape[1] * node.groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        stride=node.stride,
        padding=node.padding,
        dilation=node.dilation,
        groups=node.groups,
    )
    return _fill(layer, weight, _to_tensor(node.bias))


def _spiking_from_node(name: str, node: Any, dt: float, backend: str) -> nn.Module:
    v_reset = _to_number(name, "v_reset", node.v_reset)
    common: dict[str, Any] = {
        "v_threshold": _compact(_to_tensor(node.v_threshold)),
        "v_reset": None if _resets_softly(node) else v_reset,
        "strict": True,
        "backend": backend,
    }
    if type(node).__name__ == "IF":
        return _scale_input(_compact(_to_tensor(node.r, dt)), IF(**common))
    if type(node).__name__ == "LIF":
        _check_value(name, "v_leak", node.v_leak, v_reset, "In flexsn_nn, a membrane leaks to v_reset.")
        tau, gain = _convert_charge(name, node.tau, node.r, dt)
        if gain is None:
            return LIF(tau, decay_input=False, **common)
        return _scale_input(gain, LIF(tau, **common))
    _check_value(name, "v_leak", node.v_leak, 0.0, "CUBALIF leaks to 0.")
    _check_value(name, "v_reset", node.v_reset, 0.0, "CUBALIF would start at v_reset.")
    synapse = _convert_to_steps(name, "tau_syn", node.tau_syn, dt)
    membrane = _convert_to_steps(name, "tau_mem", node.tau_mem, dt)
    gain = _compact((_to_double(node.w_in) / synapse * _to_double(node.r) / membrane).float())
    neuron = CUBALIF(_compact((1 - 1 / synapse).float()), _compact((1 - 1 / membrane).float()), **common)
    return _scale_input(gain, neuron)


def _resets_softly(node: Any) -> bool:
    reset = (getattr(node, "metadata", None) or {}).get("reset")
    return (reset.decode() if isinstance(reset, bytes) else reset) == "subtract"


def _convert_to_steps(name: str, parameter: str, tau: Any, dt: float) -> Tensor:
    """Converts a time constant to steps."""
    steps = _to_double(tau) / dt
    if not bool((steps > 1 - 1e-6).all()):
        raise NirError(
            f"{name} has {parameter} of {float(steps.min() * dt):g} s; Euler steps of dt={dt:g} s need at "
            "least dt. Choose a smaller dt."
        )
    return steps.clamp(min=1)


def _convert_charge(name: str, tau: Any, r: Any, dt: float) -> tuple[float | Tensor, float | Tensor | None]:
    """Returns `tau` in steps, and the gain of the input; `None` if `decay_input=False` expresses the gain."""
    steps, gain = _convert_to_steps(name, "tau", tau, dt), _to_double(r)
    compact_gain = _compact(gain.float())
    if (isinstance(compact_gain, Tensor) or compact_gain != 1) and torch.allclose(gain, steps, rtol=1e-6, atol=0):
        return _compact(steps.float()), None
    return _compact(steps.float()), compact_gain


def _scale_input(gain: float | Tensor, neuron: nn.Module) -> nn.Module:
    if not isinstance(gain, Tensor) and gain == 1:
        return neuron
    return nn.Sequential(Scale(torch.as_tensor(gain)), neuron)


def _fill(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    assert isinstance(layer, nn.Module)
    return layer


def _to_double(array: Any) -> Tensor:
    return torch.as_tensor(array).double()


def _to_tensor(array: Any, factor: float = 1.0) -> Tensor:
    return (_to_double(array) * factor).float()


def _compact(tensor: Tensor) -> float | Tensor:
    """Returns a number if all elements are equal, and otherwise the tensor. Kernels load only tensors from memory."""
    first = tensor.flatten()[0]
    return float(first) if bool((tensor == first).all()) else tensor


def _to_number(name: str, parameter: str, array: Any) -> float:
    value = _compact(_to_tensor(array))
    if isinstance(value, Tensor):
        raise NirError(f"{name} has several values of {parameter}; a layer of flexsn_nn has one value.")
    return value


def _check_value(name: str, parameter: str, array: Any, expected: float, reason: str) -> None:
    if not bool((_to_tensor(array) == expected).all()):
        raise NirError(f"{name} has {parameter} other than {expected:g}. {reason}")


def _import_nir() -> Any:
    try:
        return importlib.import_module("nir")
    except ImportError as error:
        raise MissingExtraError("NIR graphs need nir: pip install 'flexsn-nn[nir]'") from error
