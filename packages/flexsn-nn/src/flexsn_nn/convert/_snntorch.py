"""Conversion of snnTorch's neurons."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from flexsn_nn import surrogate
from flexsn_nn.convert._loop import (
    LoopAlpha,
    LoopLapicque,
    LoopLeaky,
    LoopNeuron,
    LoopRLeaky,
    LoopRSynaptic,
    LoopSynaptic,
)
from flexsn_nn.convert._report import Moved
from flexsn_nn.convert._rules import (
    Replacement,
    Rule,
    Unconvertible,
    explain_own_class,
    is_derived_from,
    leave_unchanged,
    library,
)
from flexsn_nn.neuron._connections import connection, convolution

PACKAGE = "snntorch"
RESETS = {"_base_sub": "subtract", "_base_zero": "zero", "_base_int": "none"}
GATES = "it is a recurrent layer with internal weights, not a neuron: it runs unchanged."
REASONS = {
    "SLSTM": GATES,
    "SConv2dLSTM": GATES,
    "LeakyParallel": "it is an nn.RNN with a mask and its own weights: it runs unchanged.",
    "StateLeaky": "it is a convolution over time without a reset, not a scan: it runs unchanged.",
    "LinearLeaky": "it is a linear layer and a convolution over time without a reset: it runs unchanged.",
    "AssociativeLeaky": "it is a state-space layer without a reset: it runs unchanged.",
    "DeltaLeaky": "it fires when its membrane changes. No neuron here does this. Write its step: FlexSN(core, ...).",
}
RESET_NET = (
    "snntorch.utils.reset(net) and reset_hidden() do not reset it: call flexsn_nn.functional.reset_net(net), and "
    "detach_net(net) instead of detach_hidden()."
)


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the rule for a module; `None` if the module is not a neuron of snnTorch."""
    kind = type(module)
    if library(kind) == PACKAGE:
        if kind.__name__ in RULES:
            return RULES[kind.__name__]
        if kind.__name__ in REASONS:
            return leave_unchanged(REASONS[kind.__name__])
        if is_derived_from(module, PACKAGE, "SpikingNeuron"):
            return leave_unchanged("it has no counterpart here. Write its step: FlexSN(core, ...).")
        return None
    if is_derived_from(module, PACKAGE, "SpikingNeuron"):
        return leave_unchanged(explain_own_class(module, PACKAGE))
    return None


def forget(model: nn.Module) -> None:
    """Does nothing, because snnTorch stores no information about a network."""


def _convert_leaky(old: Any, backend: str) -> Replacement:
    return _move_tensors(LoopLeaky(beta=0.5, **_read_options(old, backend)), old, ["beta"])


def _convert_synaptic(old: Any, backend: str) -> Replacement:
    return _move_tensors(LoopSynaptic(alpha=0.5, beta=0.5, **_read_options(old, backend)), old, ["alpha", "beta"])


def _convert_alpha(old: Any, backend: str) -> Replacement:
    return _move_tensors(LoopAlpha(alpha=0.5, beta=0.25, **_read_options(old, backend)), old, ["alpha", "beta"])


def _convert_lapicque(old: Any, backend: str) -> Replacement:
    return _move_tensors(LoopLapicque(**_read_options(old, backend)), old, ["beta", "R", "C", "time_step"])


def _convert_rleaky(old: Any, backend: str) -> Replacement:
    neuron = LoopRLeaky(beta=0.5, all_to_all=False, **_read_options(old, backend))
    return _move_recurrent_weights(_move_tensors(neuron, old, ["beta"]), old)


def _convert_rsynaptic(old: Any, backend: str) -> Replacement:
    # snnTorch 1.0 computes the immediate reset of this neuron, and discards it.
    options = {**_read_options(old, backend), "reset_delay": True}
    neuron = LoopRSynaptic(alpha=0.5, beta=0.5, all_to_all=False, **options)
    replacement = _move_recurrent_weights(_move_tensors(neuron, old, ["alpha", "beta"]), old)
    if getattr(old, "reset_delay", True):
        return replacement
    difference = "reset_delay=False is ignored, as in snnTorch 1.0, but not by flexsn_nn.RSynaptic(reset_delay=False)."
    return replace(replacement, differences=(*replacement.differences, difference))


def _move_recurrent_weights(replacement: Replacement, old: Any) -> Replacement:
    """Moves the recurrent weights of the old neuron to the new one. The weights remain the same objects."""
    new: Any = replacement.module
    recurrent = old.recurrent
    if isinstance(recurrent, nn.Linear):
        new.recurrent = connection(recurrent.in_features, True, 1.0, recurrent.bias is not None, True, None)
        new.recurrent._parameters = dict(recurrent._parameters)
        moved = {f"recurrent.{name}": Moved(f"recurrent.{name}") for name, _ in recurrent.named_parameters()}
    elif isinstance(recurrent, nn.Conv2d):
        bias = recurrent.bias is not None
        new.recurrent = convolution(recurrent.in_channels, recurrent.kernel_size, bias, True, None)  # type: ignore[arg-type]
        new.recurrent._parameters = dict(recurrent._parameters)
        moved = {f"recurrent.{name}": Moved(f"recurrent.{name}") for name, _ in recurrent.named_parameters()}
    else:
        if isinstance(recurrent.V, nn.Parameter):
            new.recurrent.V = recurrent.V
        else:
            new.recurrent = connection(None, False, recurrent.V.float(), False, False, None)
        # In snnTorch, this parameter has two names, and a checkpoint contains it under both names.
        moved = {name: Moved("recurrent.V") for name in ("V", "recurrent.V")}
    other_moves = {key: place for key, place in replacement.moved.items() if not key.startswith("recurrent.")}
    return replace(replacement, moved={**other_moves, **moved})


RULES = {
    "Leaky": Rule(_convert_leaky),
    "Synaptic": Rule(_convert_synaptic),
    "Alpha": Rule(_convert_alpha),
    "Lapicque": Rule(_convert_lapicque),
    "RLeaky": Rule(_convert_rleaky),
    "RSynaptic": Rule(_convert_rsynaptic),
}


def _read_options(old: Any, backend: str) -> dict[str, Any]:
    """Returns the options that all snnTorch neurons share. Rejects neurons whose step combines different elements."""
    if old.inhibition:
        raise Unconvertible("inhibition=True lets only one neuron of a layer fire, so its step is not elementwise.")
    if old.state_quant:
        raise Unconvertible("state_quant is a function of the whole state. Quantize in your own step function.")
    return {
        "spike_grad": spike_function(old.spike_grad),
        "reset_mechanism": RESETS.get(getattr(old.state_function, "__name__", ""), old.reset_mechanism),
        "strict": None,
        "init_hidden": old.init_hidden,
        "output": old.output,
        "reset_delay": getattr(old, "reset_delay", True),
        "backend": backend,
    }


def _move_tensors(new: LoopNeuron, old: Any, names: list[str]) -> Replacement:
    """Passes the old neuron's tensors to the new neuron, under the same names."""
    for name in ("threshold", "graded_spikes_factor", *names):
        value = getattr(old, name, None)
        if value is None:  # the installed version of snnTorch has no graded spikes
            continue
        if not isinstance(value, nn.Parameter) and not value.is_floating_point():
            value = value.float()  # snnTorch stores threshold=1 as an integer
        new.hold(name, value)
    moved = {name: Moved(name) for name in new.state_dict()}
    dropped = {
        key: "the reset mechanism is fixed when a neuron is created."
        for key in old.state_dict()
        if key == "reset_mechanism_val"
    }
    differences = []
    if old.init_hidden:
        differences.append(RESET_NET)
    if not isinstance(new.spike_grad, surrogate.Surrogate) and new.spike_grad is not without_gradient:
        differences.append("its spike function is not a surrogate of snnTorch, and is traced unchanged.")
    return Replacement(new, moved, dropped, tuple(differences))


def without_gradient(x: Tensor) -> Tensor:
    """Computes spikes without a gradient, like snnTorch with `surrogate_disable=True`."""
    return (x > 0).to(x.dtype)


def spike_function(function: Any) -> Callable[[Tensor], Tensor]:
    """Returns this package's surrogate for a surrogate of snnTorch. Returns other functions unchanged."""
    unchanged_function: Callable[[Tensor], Tensor] = function
    if getattr(function, "__name__", "") == "_surrogate_bypass":
        return without_gradient
    if getattr(function, "__module__", "") != "snntorch.surrogate" or not inspect.isfunction(function):
        return unchanged_function
    factory = function.__qualname__.partition(".")[0]
    if factory == "SSO":
        raise Unconvertible(
            "its surrogate SSO draws random numbers in the backward pass, but kernels cannot: use LSO or another "
            "surrogate."
        )
    parameters = dict(inspect.getclosurevars(function).nonlocals)
    if factory == "custom_surrogate":
        return surrogate.custom_surrogate(parameters["func"])
    surrogate_class = getattr(surrogate, factory, None)
    if surrogate_class is None:
        return unchanged_function
    numbers = {name: float(value) for name, value in parameters.items()}
    own_surrogate: Callable[[Tensor], Tensor] = surrogate_class(**numbers)
    return own_surrogate
