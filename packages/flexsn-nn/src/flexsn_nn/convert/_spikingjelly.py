"""Conversion of neurons, surrogates, containers and layers of SpikingJelly (`spikingjelly.activation_based`)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from flexsn_nn import layer, surrogate
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._leaf import Leaf
from flexsn_nn._over_time import OverTime
from flexsn_nn.convert._containers import Concatenated, ElementWiseRecurrent, LinearRecurrent
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
from flexsn_nn.neuron import (
    CLIF,
    CUBALIF,
    EIF,
    IF,
    ILIF,
    KLIF,
    LI,
    LIAF,
    LIF,
    PLIF,
    PSN,
    QIF,
    GatedLIF,
    Izhikevich,
    MaskedPSN,
    Neuron,
    SlidingPSN,
    TernaryIF,
    TernaryLIF,
)

PACKAGE = "spikingjelly"
# Base classes of SpikingJelly's neurons.
NEURONS = ("BaseNode", "SimpleBaseNode", "NonSpikingBaseNode", "NoisyBaseNode", "NoisyNonSpikingBaseNode")
NO_COUNTERPART = "it has no counterpart here. Write its step: FlexSN(core, ...)."
FLEXSN = (
    "its core is already a step function: use flexsn_nn.FlexSN(core, num_inputs, num_states, num_outputs), with "
    "tensors that the core captures instead of static inputs."
)
RUNS_AS_IT_IS = "it runs unchanged, with SpikingJelly's code, set_step_mode and reset_net."


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the rule for a module; `None` if the module is not a neuron, layer or container of SpikingJelly."""
    kind = type(module)
    neuron = any(is_derived_from(module, PACKAGE, name) for name in NEURONS)
    stateful = neuron or is_derived_from(module, PACKAGE, "MemoryModule")
    if library(kind) != PACKAGE:
        if stateful or is_derived_from(module, PACKAGE, "StepModule"):
            return leave_unchanged(explain_own_class(module, PACKAGE), descend=not neuron)
        return None
    if not kind.__module__.startswith("spikingjelly.activation_based"):
        return leave_unchanged(
            "it is from the old clock_driven or event_driven package: first rebuild it with activation_based."
        )
    if kind.__name__ in CONTAINERS:
        return _choose_container_rule(module)
    if kind.__name__ in RECURRENT:
        return _choose_recurrent_rule(module)
    if kind.__name__ in RULES:
        return Rule(RULES[kind.__name__])
    if neuron:
        return leave_unchanged(NO_COUNTERPART)
    if kind.__name__ == "FlexSN":
        return leave_unchanged(FLEXSN)
    if stateful:
        return leave_unchanged(RUNS_AS_IT_IS, descend=True)
    if is_derived_from(module, PACKAGE, "SurrogateFunctionBase"):
        return leave_unchanged("a surrogate outside of a neuron: use a surrogate of flexsn_nn.surrogate.")
    if is_derived_from(module, PACKAGE, "StepModule"):
        return (
            Rule(_convert_stateless)
            if _find_torch_class(module) is not None
            else leave_unchanged(RUNS_AS_IT_IS, descend=True)
        )
    return None


def forget(model: nn.Module) -> None:
    """Clears SpikingJelly 2's list of modules to reset, so that SpikingJelly searches the network again."""
    functional = sys.modules.get("spikingjelly.activation_based.functional")
    invalidate = getattr(functional, "invalidate_reset_cache", None)
    if invalidate is not None:
        for module in model.modules():
            invalidate(module)


# -- neurons ---------------------------------------------------------------------------------------------


def _read_run_options(old: Any, backend: str) -> dict[str, Any]:
    if getattr(old, "_neuron_precision", None) is not None:
        raise Unconvertible("it sets a precision. Create it without this setting, and use precision='float32' here.")
    return {
        "step_mode": old.step_mode,
        "backend": backend,
        "store_state_seqs": bool(getattr(old, "store_v_seq", False)),
    }


def _read_reset_options(old: Any, backend: str) -> dict[str, Any]:
    return {
        "v_threshold": old.v_threshold,
        "v_reset": old.v_reset,
        "surrogate_function": surrogate_of(old.surrogate_function),
        "detach_reset": old.detach_reset,
        **_read_run_options(old, backend),
    }


def _move_learned(new: Neuron, old: Any, *learned: str) -> Replacement:
    """Passes the old neuron's learned parameters to the new neuron, as the same objects with the same names."""
    for name in learned:
        new.hold(name, getattr(old, name))
    return Replacement(new, {name: Moved(name) for name in learned})


def _convert_if(old: Any, backend: str) -> Replacement:
    return Replacement(IF(**_read_reset_options(old, backend)))


def _convert_simple_if(old: Any, backend: str) -> Replacement:
    if old.v_reset:
        raise Unconvertible("it starts at 0 for any v_reset, but neurons here start at v_reset. Use IFNode.")
    return _convert_if(old, backend)


def _convert_lif(old: Any, backend: str) -> Replacement:
    return Replacement(LIF(old.tau, old.decay_input, **_read_reset_options(old, backend)))


def _convert_simple_lif(old: Any, backend: str) -> Replacement:
    if old.v_reset != 0:
        raise Unconvertible("it starts at 0 for any v_reset, but neurons here start at v_reset. Use LIFNode.")
    return _convert_lif(old, backend)


def _convert_plif(old: Any, backend: str) -> Replacement:
    return _move_learned(PLIF(2.0, old.decay_input, **_read_reset_options(old, backend)), old, "w")


def _convert_qif(old: Any, backend: str) -> Replacement:
    common = _read_reset_options(old, backend)
    return Replacement(QIF(old.tau, old.v_c, old.a0, v_rest=old.v_rest, **common))


def _convert_eif(old: Any, backend: str) -> Replacement:
    common = _read_reset_options(old, backend)
    return Replacement(EIF(old.tau, old.delta_T, old.theta_rh, v_rest=old.v_rest, **common))


def _convert_izhikevich(old: Any, backend: str) -> Replacement:
    if old.w_rest != 0:
        raise Unconvertible(f"its adaptation starts at w_rest={old.w_rest}, but here at 0.")
    numbers = {name: getattr(old, name) for name in ("tau", "v_c", "a0", "v_rest", "tau_w", "a", "b")}
    return Replacement(Izhikevich(**numbers, **_read_reset_options(old, backend)))


def _convert_klif(old: Any, backend: str) -> Replacement:
    common = _read_reset_options(old, backend)
    return _move_learned(KLIF(old.scale_reset, old.tau, old.decay_input, **common), old, "k")


def _convert_cubalif(old: Any, backend: str) -> Replacement:
    return Replacement(CUBALIF(old.c_decay, old.v_decay, **_read_reset_options(old, backend)))


def _convert_liaf(old: Any, backend: str) -> Replacement:
    common = _read_reset_options(old, backend)
    new = LIAF(old.act, old.threshold_related, old.tau, old.decay_input, **common)
    differences: tuple[str, ...] = ()
    if old.step_mode == "m" and not old.store_v_seq and hasattr(old, "multi_step_functional_forward"):
        differences = (
            "its output is act(h), as in step mode 's'; SpikingJelly 2.0 ignores act in sequences, and returns spikes.",
        )
    return Replacement(new, {key: Moved(key) for key in new.state_dict()}, differences=differences)


def _convert_ilif(old: Any, backend: str) -> Replacement:
    count = old.surrogate_function
    if (count.grad_min, count.grad_max) != (0, count.max_spike_count):
        raise Unconvertible("the window of its gradient must be from 0 to the largest number of spikes.")
    new = ILIF(old.tau, count.max_spike_count, old.v_threshold, old.detach_reset, **_read_run_options(old, backend))
    return Replacement(new, differences=("it rounds v - v / tau where SpikingJelly rounds (1 - 1 / tau) v.",))


def _convert_gated_lif(old: Any, backend: str) -> Replacement:
    channels = old.alpha.numel() if old.alpha.dim() else None
    new = GatedLIF(
        old.T,
        channels,
        init_linear_decay=0.1,
        surrogate_function=surrogate_of(old.surrogate_function),
        **_read_run_options(old, backend),
    )
    names = {"linear_decay": "leak", "v_subreset": "v_sub"}
    moved = {}
    for name, value in old.named_parameters():
        key = names.get(name, name)
        target = getattr(new, key)
        fits = target.shape == value.shape or value.dim() == 0
        if fits:
            setattr(new, key, value)
        else:
            target.data = value.detach().reshape(target.shape).clone()
        moved[name] = Moved(key, None if fits else tuple(target.shape))
    differences = ["without a reset between calls, it keeps its last spike; SpikingJelly's neuron does not."]
    if channels is not None:
        differences.append("its parameters have the shape [C, 1, 1], and are new objects: give them to the optimizer.")
    return Replacement(new, moved, differences=tuple(differences))


def _convert_clif(old: Any, backend: str) -> Replacement:
    common = _read_run_options(old, backend)
    common["store_state_seqs"] = bool(getattr(old, "store_state_seqs", False))
    return Replacement(CLIF(old.tau, old.v_threshold, surrogate_of(old.surrogate_function), **common))


def _convert_ternary_if(old: Any, backend: str) -> Replacement:
    return Replacement(TernaryIF(**_read_reset_options(old, backend)))


def _convert_ternary_lif(old: Any, backend: str) -> Replacement:
    return Replacement(TernaryLIF(old.tau, old.decay_input, **_read_reset_options(old, backend)))


def _convert_li(old: Any, backend: str) -> Replacement:
    return Replacement(Readout(LI(old.tau, backend=backend), old.decode))


def _convert_psn(old: Any, backend: str) -> Replacement:
    return _move_weights(PSN(old.T, surrogate_of(old.surrogate_function)), old)


def _convert_masked_psn(old: Any, backend: str) -> Replacement:
    if old.step_mode != "m":
        raise Unconvertible("in step mode 's', it depends on the index of the step; here, it takes whole sequences.")
    new = MaskedPSN(old.k, old.T, 0.0, surrogate_of(old.surrogate_function))
    new._lambda_ = old._lambda_
    replacement = _move_weights(new, old)
    reason = "it is computed from k and T."
    moved = {**replacement.moved, "_lambda_": Moved("_lambda_")}
    return Replacement(new, moved, {"mask0": reason, "mask1": reason})


def _convert_sliding_psn(old: Any, backend: str) -> Replacement:
    new = SlidingPSN(old.k, surrogate_function=surrogate_of(old.surrogate_function), step_mode=old.step_mode)
    replacement = _move_weights(new, old)
    difference = (
        "a call continues the sequence of the last call, until reset(); SpikingJelly's multi-step calls do not."
    )
    return Replacement(new, replacement.moved, differences=(difference,))


def _move_weights(new: Any, old: Any) -> Replacement:
    new.weight, new.bias = old.weight, old.bias
    return Replacement(new, {"weight": Moved("weight"), "bias": Moved("bias")})


class Readout(Leaf):
    """Leaky integrator that begins with its initial state in each call, and a readout of its membrane.

    Args:
        neuron: the integrator.
        decode: `"max-mem"`, `"max-abs-mem"`, `"mean-mem"` or `"last_mem"`, as in SpikingJelly's `NonSpikingLIFNode`.
            For any other value, the result is a list of the membranes of all steps.
    """

    def __init__(self, neuron: LI, decode: str | None) -> None:
        super().__init__()
        self.neuron = neuron
        self.decode = decode

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Returns `[*step]` for `[T, *step]`, or a list of `T` membranes `[*step]`."""
        v, _ = self.neuron.step(x)
        if self.decode == "max-mem":
            return v.max(0).values
        if self.decode == "max-abs-mem":
            high, low = v.max(0).values, v.min(0).values
            return high * (high.abs() > low.abs()) + low * (high.abs() <= low.abs())
        if self.decode == "mean-mem":
            return v.mean(0)
        return v[-1] if self.decode == "last_mem" else list(v)


# -- surrogates ------------------------------------------------------------------------------------------


def surrogate_of(function: Any) -> Callable[[Tensor], Tensor]:
    """Returns this package's surrogate for a surrogate of SpikingJelly. Returns other functions unchanged."""
    kind = type(function)
    if library(kind) != PACKAGE:
        return function  # type: ignore[no-any-return]
    if not getattr(function, "spiking", True):
        raise Unconvertible("its surrogate has spiking=False: it is a smooth function, and returns no spikes.")
    if kind.__name__ == "DeterministicPass":
        return surrogate.StraightThrough()
    if kind.__name__ == "PoissonPass":
        raise Unconvertible("its surrogate draws random numbers: use StochasticLIF.")
    if kind.__name__ == "SquarewaveFourierSeries":
        if function.n < 2:
            raise Unconvertible("its surrogate has no terms (n=1), and therefore no gradient.")
        # In SpikingJelly, n is the index of the first omitted term.
        return surrogate.SquarewaveFourierSeries(function.n - 1, function.T_period)
    surrogate_class = getattr(surrogate, kind.__name__, None)
    if surrogate_class is None:
        raise Unconvertible(f"its surrogate {kind.__name__} has no counterpart in flexsn_nn.surrogate.")
    fields = [name for name in surrogate_class.__dataclass_fields__ if name != "strict"]
    return surrogate_class(**{name: getattr(function, name) for name in fields})  # type: ignore[no-any-return]


# -- layers ----------------------------------------------------------------------------------------------


def _find_torch_class(module: nn.Module) -> type[nn.Module] | None:
    """Returns PyTorch's class from which a layer of the same name is derived; `None` if there is no such class."""
    kind = type(module)
    for base in kind.__mro__:
        if library(base) == "torch" and base.__name__ == kind.__name__:
            return base
    return None


def to_torch_layer(module: nn.Module) -> nn.Module:
    """Returns a copy of a layer as an object of PyTorch's own class, with the same parameters and hooks."""
    kind = _find_torch_class(module)
    assert kind is not None
    torch_layer = kind.__new__(kind)
    attributes = {name: copy.copy(value) if name[0] == "_" else value for name, value in module.__dict__.items()}
    attributes.pop("_step_mode", None)
    torch_layer.__dict__.update(attributes)
    return torch_layer


def _convert_stateless(old: Any, backend: str) -> Replacement:
    """Converts a layer that differs from PyTorch's class only by a step mode.

    For sequences, the new layer is inside of an `OverTime`, unless it is an `nn.Linear`.
    """
    torch_layer = to_torch_layer(old)
    if old.step_mode == "s" or isinstance(torch_layer, nn.Linear):
        return Replacement(torch_layer, {key: Moved(key) for key in old.state_dict()})
    if isinstance(torch_layer, nn.MaxUnpool1d | nn.MaxUnpool2d | nn.MaxUnpool3d) or getattr(
        torch_layer, "return_indices", False
    ):
        raise Unconvertible(f"it takes or returns indices with the sequence: {RUNS_AS_IT_IS}")
    return Replacement(OverTime(torch_layer), {key: Moved(f"0.{key}") for key in old.state_dict()})


def _convert_threshold_norm(old: Any, backend: str) -> Replacement:
    new = getattr(layer, type(old).__name__)(
        old.num_features, eps=old.eps, momentum=old.momentum, track_running_stats=old.track_running_stats
    )
    norm = new[0]
    norm._parameters = dict(old._parameters)
    norm._buffers = dict(old._buffers)
    return Replacement(new, {key: Moved(f"0.{key}") for key in old.state_dict()})


def _convert_dropout(old: Any, backend: str) -> Replacement:
    return Replacement(layer.SharedDropout(old.p, type(old).__name__ == "Dropout2d", old.step_mode))


def _convert_delay(old: Any, backend: str) -> Replacement:
    return Replacement(layer.Delay(old.delay_steps, step_mode=old.step_mode))


def _choose_container_rule(module: Any) -> Rule:
    """Chooses the rule of a container.

    A container that folds time into the batch becomes an `OverTime`, and a container for single steps an
    `nn.Sequential`. A container that loops over time is not replaced.
    """
    if type(module).__name__ == "StepModeContainer":
        if module.step_mode == "s":
            return Rule(_convert_stateless, _create_sequential, container=True)
        if module.stateful:
            return leave_unchanged("it loops over time; its neurons are converted. " + RUNS_AS_IT_IS, descend=True)
    return Rule(_convert_stateless, _create_over_time, container=True)


def _choose_recurrent_rule(module: Any) -> Rule:
    """Chooses the rule of a recurrent container.

    A `LinearRecurrentContainer` of linear layers followed by a neuron, and an `ElementWiseRecurrentContainer` of a
    neuron, become `Recurrent` layers. Other containers are not replaced, and loop over time.
    """
    linear = type(module).__name__ == "LinearRecurrentContainer"
    sub_module = module.sub_module
    children = list(sub_module.named_children()) if type(sub_module) is nn.Sequential else []
    (*others, last) = [child for _, child in children] or [sub_module]
    is_convertible = library(type(last)) == PACKAGE and type(last).__name__ in RULES
    layers = [child for child in others if isinstance(child, nn.Linear)]
    if not is_convertible or len(layers) < len(others) or (layers and not linear):
        return leave_unchanged("it loops over time; its neurons are converted. " + RUNS_AS_IT_IS, descend=True)

    def make(old: Any, backend: str) -> Replacement:
        neuron = RULES[type(last).__name__](last, backend)
        if not isinstance(neuron.module, FlexSN):
            raise Unconvertible(f"its {type(last).__name__} has no step-by-step counterpart here.")
        options: Any = {"step_mode": old.step_mode, "backend": backend}
        prefix = f"sub_module.{children[-1][0]}." if children else "sub_module."
        moved = {prefix + key: replace(place, key=f"neuron.{place.key}") for key, place in neuron.moved.items()}
        dropped = {prefix + key: reason for key, reason in neuron.dropped.items()}
        if not linear:
            recurrent: FlexSN = ElementWiseRecurrent(neuron.module, old.element_wise_function, **options)
            return Replacement(recurrent, moved, dropped, neuron.differences)
        recurrent = LinearRecurrent(neuron.module, Concatenated(old.rc, layers), **options)
        moved |= {f"rc.{key}": Moved(f"recurrent.rc.{key}") for key in old.rc.state_dict()}
        for i, (name, child) in enumerate(children[:-1]):
            moved |= {f"sub_module.{name}.{key}": Moved(f"recurrent.layers.{i}.{key}") for key in child.state_dict()}
        return Replacement(recurrent, moved, dropped, (*neuron.differences, APART))

    return Rule(make, descend=True)


def _create_over_time(module: Any, children: Mapping[str, nn.Module]) -> nn.Module:
    return _add_children(OverTime(), children)


def _create_sequential(module: Any, children: Mapping[str, nn.Module]) -> nn.Module:
    return _add_children(nn.Sequential(), children)


def _add_children(container: nn.Sequential, children: Mapping[str, nn.Module]) -> nn.Module:
    for name, child in children.items():
        container.add_module(name, child)
    return container


RECURRENT = ("LinearRecurrentContainer", "ElementWiseRecurrentContainer")
APART = (
    "the input's part of the product is computed for all steps at once, and the feedback is added to it: sums have "
    "another order, so the last bits may differ."
)
CONTAINERS = ("SeqToANNContainer", "StepModeContainer")
RULES: dict[str, Callable[[Any, str], Replacement]] = {
    "IFNode": _convert_if,
    "SimpleIFNode": _convert_simple_if,
    "LIFNode": _convert_lif,
    "SimpleLIFNode": _convert_simple_lif,
    "ParametricLIFNode": _convert_plif,
    "QIFNode": _convert_qif,
    "EIFNode": _convert_eif,
    "IzhikevichNode": _convert_izhikevich,
    "KLIFNode": _convert_klif,
    "CUBALIFNode": _convert_cubalif,
    "LIAFNode": _convert_liaf,
    "ILIFNode": _convert_ilif,
    "GatedLIFNode": _convert_gated_lif,
    "ComplementaryLIFNode": _convert_clif,
    "TernaryIFNode": _convert_ternary_if,
    "TernaryLIFNode": _convert_ternary_lif,
    "NonSpikingLIFNode": _convert_li,
    "PSN": _convert_psn,
    "MaskedPSN": _convert_masked_psn,
    "SlidingPSN": _convert_sliding_psn,
    "ThresholdDependentBatchNorm1d": _convert_threshold_norm,
    "ThresholdDependentBatchNorm2d": _convert_threshold_norm,
    "ThresholdDependentBatchNorm3d": _convert_threshold_norm,
    "Dropout": _convert_dropout,
    "Dropout2d": _convert_dropout,
    "Delay": _convert_delay,
}
