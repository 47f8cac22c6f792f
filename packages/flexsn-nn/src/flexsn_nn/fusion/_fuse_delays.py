"""Finds delays before neurons, and moves them into the neurons' kernels."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flexsn_nn._delay import Delay
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._handover import Handover
from flexsn_nn._stateful import is_own_forward
from flexsn_nn.fusion._pairs import LeftError, find_neuron_after, trace_network, why_not_into
from flexsn_nn.fusion._report import DelayFusion


def fuse_delays(net: nn.Module, *, skip: Collection[str] = ()) -> DelayFusion:
    """Moves delays into the kernels of the neurons after them, in place, so that delayed sequences are never written.

    A `layer.Delay` is fused if its output goes only to one neuron. To check this, `forward` is traced with `torch.fx`.
    Outputs, states and gradients equal those of the unchanged network. If the neuron's kernels are elementwise and in
    Triton, they load each value of the delayed sequence from an earlier step of the delay's input. The delay runs
    before the neuron as usual if the kernels are not elementwise, if the neuron runs in a loop, in C++, inside of
    `torch.compile` or in step mode `"s"`, if the delay continues from an earlier call, or if a delay with the
    interpolation `"triangle"` or `"gaussian"` is trained. A fused `Delay` returns its input, even if it is called
    separately.

    Args:
        net: trained or new network, in any mode, on any device. Call `fuse_delays` before `torch.compile`, and before
            wrapping the network, for example in `DistributedDataParallel`. `unfuse_norms(net)` undoes the fusion.
        skip: names of delays or neurons to leave unchanged.

    Returns:
        The fused pairs, and the delays that were not fused, with the reasons.

    Raises:
        UnknownNameError: `net` has no module with a name in `skip`.

    Example:
        >>> from flexsn_nn import LIF
        >>> net = nn.Sequential(nn.Linear(4, 3), Delay(1.5), LIF(), Delay(2))
        >>> print(fuse_delays(net))
        1 of 2 delays are computed by neurons
          1 into 2
        unchanged:
          3: its output goes to the module's result, which is not a neuron
    """
    modules, flows = trace_network(net, skip)
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, layer in modules.items():
        if not isinstance(layer, Delay):
            continue
        try:
            neuron_name = find_neuron_after(name, modules, flows, owner="")
            if not {name, neuron_name}.isdisjoint(skip):
                raise LeftError("it is in skip")
            neuron = modules[neuron_name]
            assert isinstance(neuron, FlexSN)
            if layer._handover is None or layer._handover is not neuron._handover:
                reason = _why_not(layer, neuron)
                if reason is not None:
                    raise LeftError(reason)
                layer._handover = neuron._handover = Handover()
        except LeftError as error:
            left[name] = str(error)
            continue
        fused[name] = neuron_name
    return DelayFusion(fused, left)


def _why_not(layer: Delay, neuron: FlexSN) -> str | None:
    reason = why_not_into(neuron)
    if reason is not None:
        return reason
    if not is_own_forward(layer):
        return f"{type(layer).__name__} overrides forward"
    if layer._forward_hooks:
        return "it has a forward hook, which would receive the undelayed sequence"
    if neuron._handover is not None or layer._handover is not None:
        return "it or its neuron is part of another pair"
    if layer.step_mode != neuron.step_mode:
        return f"it has step_mode={layer.step_mode!r}, but its neuron has {neuron.step_mode!r}"
    return None
