"""Acts on modules: hooks, copies, and pickles."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from lives.acts import act, which, yes_or_no
from lives.hooks import HalveGradient, LogSums, Scale, ScaleInput, SetAttribute
from lives.life import Life

_FORWARD_HOOKS: dict[str, type[Any]] = {"look": LogSums, "scale": Scale}
_FORWARD_PRE_HOOKS: dict[str, type[Any]] = {"scale input": ScaleInput, "set attribute": SetAttribute}


@act(
    kind=st.sampled_from(["look", "scale", "scale input", "set attribute", "halve gradient"]),
    which=which,
    inside=yes_or_no,
)
def hook(life: Life, kind: str, which: int, inside: bool) -> dict[str, Any]:
    """Registers a hook on a layer, or on a module inside a layer."""
    modules = [m for m in life.net.modules() if m is not life.net] if inside else list(life.net.children())
    module = modules[which % len(modules)]
    if kind not in ("scale", "scale input") and any(module in _list_inner_modules(neuron) for neuron in life.neurons):
        return {}  # a trace calls the hook once, but the loop calls it at each step
    if kind in _FORWARD_HOOKS:
        handle = module.register_forward_hook(_FORWARD_HOOKS[kind]())
    elif kind in _FORWARD_PRE_HOOKS:
        handle = module.register_forward_pre_hook(_FORWARD_PRE_HOOKS[kind]())
    else:
        handle = module.register_full_backward_hook(HalveGradient())
    life.handles.append(handle)
    return {}


def _list_inner_modules(neuron: nn.Module) -> set[nn.Module]:
    """Returns the modules inside the step of a neuron."""
    return set(neuron.modules()) - {neuron}


@act(when=lambda life: bool(life.handles), which=which)
def unhook(life: Life, which: int) -> dict[str, Any]:
    """Removes a hook."""
    if life.handles:
        life.handles.pop(which % len(life.handles)).remove()
    return {}


@act(how=st.sampled_from(["deepcopy", "pickle"]))
def copy(life: Life, how: str) -> dict[str, Any]:
    """Replaces the network by a copy."""
    while life.monitors:
        life.monitors.pop().remove()
    net: nn.Module
    if how == "pickle":
        buffer = io.BytesIO()
        torch.save(life.net, buffer)
        buffer.seek(0)
        net = torch.load(buffer, weights_only=False)
    else:
        net = deepcopy(life.net)
    life.net = net
    life.optimizer = None
    life.handles.clear()
    life.saved_states = None
    return {}
