"""Groups a network's parameters for an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(net: nn.Module, tau_lr: float | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Separates weights from neuron parameters; see `functional.parameter_groups`."""
    from flexsn_nn.functional import neurons  # imported here because that module imports this one
    from flexsn_nn.neuron import Feedback

    numbers: dict[int, nn.Parameter] = {}
    for _, neuron in neurons(net):
        weights: set[int] = set()
        for module in neuron.modules():
            if isinstance(module, Feedback):
                weights |= {id(parameter) for parameter in module.recurrent.parameters()}
        for parameter in neuron.parameters():
            if id(parameter) not in weights and sum(size > 1 for size in parameter.shape) <= 1:
                numbers[id(parameter)] = parameter
    every = {id(parameter): parameter for parameter in net.parameters()}
    rest = [parameter for key, parameter in every.items() if key not in numbers]
    own: dict[str, Any] = {"params": [p for key, p in every.items() if key in numbers], "weight_decay": 0.0, **options}
    if tau_lr is not None:
        own["lr"] = tau_lr
    groups: list[dict[str, Any]] = [{"params": rest}, own]
    return [group for group in groups if group["params"]]
