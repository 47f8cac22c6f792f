"""Acts on states, modes, and options."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from flexsn_nn import LIF, OverTime
from flexsn_nn.functional import detach_net, get_states, reset_net, set_states, set_step_mode
from flexsn_nn.fusion import fuse_norms, unfuse_norms
from flexsn_nn.monitor import SpikeMonitor, StateMonitor
from lives.acts import act, which, yes_or_no
from lives.life import Life


@act(weight=1)
def reset(life: Life) -> dict[str, Any]:
    """Resets all states."""
    reset_net(life.net)
    return {}


@act()
def detach(life: Life) -> dict[str, Any]:
    """Detaches all states."""
    detach_net(life.net)
    return {}


@act(which=which, how=st.sampled_from(["reset", "detach"]))
def one_neuron(life: Life, which: int, how: str) -> dict[str, Any]:
    """Resets or detaches one neuron."""
    neuron = life.neuron(which)
    if neuron is not None:
        getattr(neuron, how)()
    return {}


@act()
def save_states(life: Life) -> dict[str, Any]:
    """Stores the states of all layers."""
    life.saved_states = get_states(life.net)
    return {}


@act(when=lambda life: life.saved_states is not None, learned=yes_or_no)
def restore_states(life: Life, learned: bool) -> dict[str, Any]:
    """Assigns the stored states. If `learned` is True, they are assigned as leaves that require a gradient."""
    if life.saved_states is None or list(life.saved_states) != list(get_states(life.net)):
        return {}
    states = life.saved_states
    if learned:
        states = {
            name: [s.detach().clone().requires_grad_(s.is_floating_point()) for s in values]
            for name, values in states.items()
        }
    set_states(life.net, states)
    return {}


@act(mode=st.sampled_from(["s", "m"]), fresh=yes_or_no)
def step_mode(life: Life, mode: str, fresh: bool) -> dict[str, Any]:
    """Sets the step mode of the network."""
    if fresh:
        reset_net(life.net)
    for neuron in life.neurons:
        neuron.backend = "auto"
    set_step_mode(life.net, mode)
    life.step_mode = mode
    life.set_backends(life.net)
    return {}


@act(weight=2, which=which, on=yes_or_no)
def store_state_seqs(life: Life, which: int, on: bool) -> dict[str, Any]:
    """Turns the storage of state sequences on or off, for one neuron."""
    neuron = life.neuron(which)
    if neuron is not None:
        neuron.store_state_seqs = on
    return {}


@act(weight=2, which=which, on=yes_or_no)
def count_spikes(life: Life, which: int, on: bool) -> dict[str, Any]:
    """Turns the counting of spikes on or off, for one neuron."""
    neuron = life.neuron(which)
    if neuron is not None:
        neuron.count_spikes = on
    return {}


@act(state=yes_or_no)
def monitor(life: Life, state: bool) -> dict[str, Any]:
    """Adds a monitor of spikes or states, or removes the existing monitor."""
    if life.monitors:
        life.monitors.pop().remove()
    elif life.neurons and not any(neuron.num_outputs > 1 for neuron in life.neurons):
        if not state:
            life.monitors.append(SpikeMonitor(life.net))
        else:
            life.monitors.append(StateMonitor(life.net, 0))
    return {}


@act(training=yes_or_no)
def train_or_eval(life: Life, training: bool) -> dict[str, Any]:
    """Sets the training mode."""
    life.net.train(training)
    return {}


@act(when=lambda life: any(isinstance(m, OverTime) for m in life.net.modules()), fuse=yes_or_no)
def norms(life: Life, fuse: bool) -> dict[str, Any]:
    """Fuses the norms with the neurons, or reverts the fusion."""
    if not fuse:
        unfuse_norms(life.net)
        return {}
    return {"fused": list(fuse_norms(life.net).fused)}


@act(dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16"]), fresh=yes_or_no)
def dtype(life: Life, dtype: str, fresh: bool) -> dict[str, Any]:
    """Converts the network to another dtype, either after a reset or with its current states."""
    life.dtype = getattr(torch, dtype)
    if fresh:
        reset_net(life.net)
    life.net.to(life.dtype)
    life.drop_graphs()
    life.inputs = None
    return {}


@act(
    when=lambda life: any(isinstance(m, LIF) for m in life.net.modules()),
    which=which,
    number=st.sampled_from([2.0, 3.0]),
)
def number(life: Life, which: int, number: float) -> dict[str, Any]:
    """Assigns a new value to the time constant of a neuron, which is a constant in kernels."""
    candidates = [m for m in life.neurons if isinstance(m, LIF) and isinstance(m.tau, float)]
    if candidates:
        candidates[which % len(candidates)].tau = number
    return {}


@act(which=which)
def train_or_eval_one(life: Life, which: int) -> dict[str, Any]:
    """Changes the training mode of one layer."""
    layers = list(life.net.children())
    layer: nn.Module = layers[which % len(layers)]
    layer.train(not layer.training)
    return {}
