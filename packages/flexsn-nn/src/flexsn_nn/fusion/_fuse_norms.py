"""Finds norms before neurons, and moves their affine parts into the neurons' steps."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flexsn_nn._batch_affine import is_batch_norm
from flexsn_nn._checks import check_module
from flexsn_nn._delay import Delay
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._handover import Handover
from flexsn_nn._over_time import OverTime, split_norm
from flexsn_nn.fusion._dataflow import Dataflow
from flexsn_nn.fusion._pairs import LeftError, find_neuron_after, trace_network, why_not_into
from flexsn_nn.fusion._report import FusedNorm, Fusion, LeftNorm
from flexsn_nn.layer import NormNeuron


def fuse_norms(net: nn.Module, *, skip: Collection[str] = ()) -> Fusion:
    """Makes neurons compute the affine part of the batch norms before them, in place; see `layer.NormNeuron`.

    A norm is fused if it ends an `OverTime` whose output goes only to one neuron. To check this, `forward` of
    `nn.Sequential` and of the user's modules is traced with `torch.fx`, in training and in evaluation mode. Modules,
    their names, parameters and buffers, `state_dict()` and optimizers do not change. An `OverTime` whose norm was fused
    returns the input of the norm, even if it is called separately.

    Args:
        net: trained or new network, in any mode, on any device. Call `fuse_norms` before `torch.compile`, and before
            wrapping the network, for example in `DistributedDataParallel`.
        skip: names of norms, layers or neurons to leave unchanged.

    Returns:
        The norms that were fused, and the norms that were not fused, with the reasons.

    Raises:
        UnknownNameError: `net` has no module with a name in `skip`.

    Example:
        >>> from flexsn_nn import LIF
        >>> net = nn.Sequential(OverTime(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), LIF(), OverTime(nn.BatchNorm2d(8)))
        >>> print(fuse_norms(net))
        1 of 2 batch norms are computed by neurons
          0.1 into 1
        unchanged:
          2.0: its output goes to the module's result, which is not a neuron
    """
    modules, flows = trace_network(net, skip)
    ended_by = {_find_last_layer(layer): name for name, layer in modules.items() if isinstance(layer, OverTime)}
    absorbed_norms = {
        norm for module in modules.values() if isinstance(module, NormNeuron) for norm in module.norm.modules()
    }
    fused: list[FusedNorm] = []
    left: list[LeftNorm] = []
    for name, norm in modules.items():
        if not is_batch_norm(norm) or norm in absorbed_norms:
            continue
        try:
            if norm not in ended_by:
                raise LeftError("it is not the last layer of an OverTime")
            layer_name = ended_by[norm]
            neuron_name = _find_neuron_after(layer_name, modules, flows)
            if not {name, layer_name, neuron_name}.isdisjoint(skip):
                raise LeftError("it is in skip")
        except LeftError as error:
            left.append(LeftNorm(name, str(error)))
            continue
        fused.append(FusedNorm(name, layer_name, neuron_name))
    for pair in fused:
        layer, neuron = modules[pair.layer], modules[pair.neuron]
        assert isinstance(layer, OverTime)
        assert isinstance(neuron, FlexSN)
        if layer._handover is None:
            layer._handover = neuron._handover = Handover()
    return Fusion(tuple(fused), tuple(left))


def unfuse_norms(net: nn.Module) -> None:
    """Undoes `fuse_norms` and `fuse_delays`, so that norms and delays run in their own layers again."""
    check_module("net", net)
    for module in net.modules():
        if isinstance(module, OverTime | Delay | FlexSN):
            module._handover = None


def _find_last_layer(layer: nn.Module) -> nn.Module | None:
    while isinstance(layer, OverTime) or type(layer) is nn.Sequential:
        if not len(layer):
            return None
        layer = layer[-1]
    return layer


def _find_neuron_after(layer_name: str, modules: dict[str, nn.Module], flows: list[Dataflow]) -> str:
    """Returns the name of the neuron that is the only reader of an `OverTime`'s output and can compute its norm."""
    layer = modules[layer_name]
    assert isinstance(layer, OverTime)
    name = find_neuron_after(layer_name, modules, flows, owner="its layer")
    neuron = modules[name]
    assert isinstance(neuron, FlexSN)
    if layer._handover is None or layer._handover is not neuron._handover:
        reason = _why_not(layer, neuron)
        if reason is not None:
            raise LeftError(reason)
    return name


def _why_not(layer: OverTime, neuron: FlexSN) -> str | None:
    reason = why_not_into(neuron)
    if reason is not None:
        return reason
    if layer._forward_hooks:
        return "its layer has a forward hook, which would receive the sequence before the norm"
    if split_norm(layer)[1] is None:
        return "it has hooks"
    if neuron._handover is not None or layer._handover is not None:
        return "its layer or its neuron is part of another pair"
    if layer.step_mode != neuron.step_mode:
        return f"its layer has step_mode={layer.step_mode!r}, but its neuron has {neuron.step_mode!r}"
    return None
