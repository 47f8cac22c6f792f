"""Groups a network's parameters for an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(net: nn.Module, tau_lr: float | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Separates weights from neuron parameters; see `functional.parameter_groups`."""
    from flexsn_nn.functional import neurons  # imported here because that module imports this one
    from flexsn_nn.neuron import Feedback

    neuron_parameters: dict[int, nn.Parameter] = {}
    for _, neuron in neurons(net):
        weights: set[int] = set()
        for module in neuron.modules():
            if isinstance(module, Feedback):
                weights |= {id(parameter) for parameter in module.recurrent.parameters()}
        for parameter in neuron.parameters():
            if id(parameter) not in weights and sum(size > 1 for size in parameter.shape) <= 1:
                neuron_parameters[id(parameter)] = parameter
    parameter_by_id = {id(parameter): parameter for parameter in net.parameters()}
    rest = [parameter for key, parameter in parameter_by_id.items() if key not in neuron_parameters]
    neuron_group: dict[str, Any] = {
        "params": [p for key, p in parameter_by_id.items() if key in neuron_parameters],
        "weight_decay": 0.0,
        **options,
    }
    if tau_lr is not None:
        neuron_group["lr"] = tau_lr
    groups: list[dict[str, Any]] = [{"params": rest}, neuron_group]
    return [group for group in groups if group["params"]]
