"""Hints about arguments and attributes of other libraries. A hint gives the corresponding name in this library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names of constructor arguments.
_PARAMETERS = {
    "beta": "a decay `beta` is `tau=1 / (1 - beta), decay_input=False` here; `Leaky(beta=...)` takes it directly",
    "alpha": "`Synaptic(alpha, beta)` and `Alpha(alpha, beta)` take it",
    "decay": "a decay `beta` is `tau=1 / (1 - beta), decay_input=False` here; `Leaky(beta=...)` takes it directly",
    "tau_mem": "it is `tau`, in steps",
    "tau_m": "it is `tau`, in steps",
    "threshold": "it is `v_threshold`",
    "v_th": "it is `v_threshold`",
    "v_threshold": "it is `threshold`",
    "thresh": "it is `v_threshold`, or `threshold` of snnTorch's neurons",
    "spike_grad": "it is `surrogate_function`",
    "surrogate": "it is `surrogate_function`, or `spike_grad` of snnTorch's neurons",
    "surrogate_function": "it is `spike_grad`",
    "reset_mechanism": "it is `v_reset`: None to subtract the threshold, a number to reset to it",
    "v_reset": 'it is `reset_mechanism`: "subtract" or "zero"',
    "init_hidden": "leave it out: the state is kept until reset()",
    "output": "leave it out: `neuron.states` has the states after a call",
    "store_v_seq": "it is `store_state_seqs`",
    "learn_beta": "give an nn.Parameter: tau=nn.Parameter(...)",
    "learn_threshold": "give an nn.Parameter: v_threshold=nn.Parameter(...)",
    "cupy_fp32_inference": "leave it out",
}
# Attributes of neurons.
_ATTRIBUTES = {
    "mem": 'the membrane is `neuron.state("v")`, and `None` before the first call',
    "syn": 'the current is `neuron.state("i")`',
    "v_seq": '`neuron.state_seq("v")` has the membrane after each step, with store_state_seqs=True',
    "store_v_seq": "it is `store_state_seqs`",
    "init_leaky": "nothing has to be initialised; `neuron.reset()` drops the state",
    "init_synaptic": "nothing has to be initialised; `neuron.reset()` drops the state",
    "init_mem": "nothing has to be initialised; `neuron.reset()` drops the state",
    "reset_mem": "it is `neuron.reset()`",
    "reset_hidden": "it is `neuron.reset()`",
    "detach_hidden": "it is `neuron.detach()`",
    "multi_step_forward": "call the neuron, in step_mode='m'",
    "single_step_forward": "call the neuron, in step_mode='s'",
    "functional_forward": "it is `outputs, states = neuron.step(inputs, states)`",
    "neuronal_charge": "the step is `neuron.dynamics`; see docs/writing-a-neuron.md",
    "neuronal_fire": "the step is `neuron.dynamics`; see docs/writing-a-neuron.md",
    "neuronal_reset": "the step is `neuron.dynamics`; see docs/writing-a-neuron.md",
    "kernel": "kernels are built in the first call; `FlexSNKernel` is a kernel as a function",
}


def of_parameter(name: str, known_names: Iterable[str]) -> str:
    """Returns a hint about the argument that replaces an unknown argument."""
    names = list(known_names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if near:
        return f"Did you mean {near[0]!r}?"
    hint = _PARAMETERS.get(name)
    return f"{hint[0].upper()}{hint[1:]}." if hint else f"It has {', '.join(names)}."


def of_attribute(name: str, state_names: Iterable[str]) -> str | None:
    """Returns a hint about the attribute that replaces an unknown attribute; `None` if there is no hint."""
    if name in state_names:
        return f'states are read with `neuron.state("{name}")`, and set with `neuron.states = [...]`'
    return _ATTRIBUTES.get(name)
