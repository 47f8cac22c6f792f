"""Acts that freeze, replace, change in place, save, load, prune, or parametrise parameters."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from flexsn_nn.functional import detach_net
from lives.acts import act, which, yes_or_no
from lives.life import Life

factor = st.sampled_from([0.5, 2.0])


@act(which=which, on=yes_or_no)
def requires_grad(life: Life, which: int, on: bool) -> dict[str, Any]:
    """Freezes a parameter, or unfreezes it."""
    place = life.parameter(which)
    if place is not None:
        place[2].requires_grad_(on)
    return {}


@act(which=which, factor=factor, new_shape=yes_or_no)
def replace(life: Life, which: int, factor: float, new_shape: bool) -> dict[str, Any]:
    """Assigns a new parameter. If `new_shape` is True, a parameter with one element gets another shape that broadcasts
    in the same way.
    """
    place = life.parameter(which)
    if place is None:
        return {}
    module, name, parameter = place
    value = parameter.detach() * factor
    if new_shape and value.dim() == 1 and value.numel() == 1:
        value = value[0].clone()
    elif new_shape and value.dim() == 0:
        value = value.view(1).clone()
    setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    return {}


@act(which=which, factor=factor, how=st.sampled_from(["mul_", "data", "copy_", "set data"]))
def change_in_place(life: Life, which: int, factor: float, how: str) -> dict[str, Any]:
    """Changes the values of a parameter, in one of several ways."""
    place = life.parameter(which)
    if place is None:
        return {}
    parameter = place[2]
    with torch.no_grad():
        if how == "mul_":
            parameter.mul_(factor)
        elif how == "data":
            parameter.data.mul_(factor)
        elif how == "copy_":
            parameter.copy_(parameter * factor)
        else:
            parameter.data = parameter.data * factor
    if "data" in how:
        # Autograd does not detect this change. Gradients of existing graphs would use the old or the new value,
        # depending on the tensors that a graph saves.
        life.drop_graphs()
        detach_net(life.net)
    return {}


@act()
def save(life: Life) -> dict[str, Any]:
    """Stores a copy of the `state_dict`."""
    life.saved = {name: value.detach().clone() for name, value in life.net.state_dict().items()}
    return {}


@act(when=lambda life: life.saved is not None, assign=yes_or_no, strict=yes_or_no)
def load(life: Life, assign: bool, strict: bool) -> dict[str, Any]:
    """Loads the stored `state_dict`."""
    if life.saved is None:
        return {}
    saved = {name: value.clone() for name, value in life.saved.items()}
    keys = life.net.load_state_dict(saved, strict=strict, assign=assign)
    return {"missing": list(keys.missing_keys), "unexpected": list(keys.unexpected_keys)}


@act(when=lambda life: life.matrix(0) is not None, which=which, how=st.sampled_from(["prune", "remove"]))
def prune_weights(life: Life, which: int, how: str) -> dict[str, Any]:
    """Prunes half of a matrix, which may already be pruned, or makes the pruning permanent."""
    module = life.matrix(which)
    if module is None or parametrize.is_parametrized(module):
        return {}
    if how == "prune":
        prune.l1_unstructured(module, "weight", amount=0.5)
    elif prune.is_pruned(module):
        prune.remove(module, "weight")
    return {}


class Doubled(nn.Module):
    """An elementwise parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Symmetric(nn.Module):
    """A parametrisation in which each element depends on another element of the matrix."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.transpose(0, 1)) / 2


@act(when=lambda life: life.matrix(0) is not None, which=which, how=st.sampled_from(["double", "symmetric", "remove"]))
def parametrise(life: Life, which: int, how: str) -> dict[str, Any]:
    """Parametrises a matrix, or removes its parametrisation."""
    module = life.matrix(which)
    if module is None or prune.is_pruned(module):
        return {}
    if how != "remove" and not parametrize.is_parametrized(module):
        parametrize.register_parametrization(module, "weight", Doubled() if how == "double" else Symmetric())
    elif how == "remove" and parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight")
    return {}
