"""The backward of one time step: a search for values with gradients, and the vector-Jacobian product (VJP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop.loop._absent import is_zero
from flexsn_hop.loop._arguments import StepFunction
from flexsn_hop.loop._eager import step_values

__all__ = ["Activity", "find_activity", "step_vjp", "without_absent"]


@dataclass(frozen=True, slots=True)
class Activity:
    """The outputs and states through which a gradient flows.

    Attributes:
        outputs: For each output, True if the output depends differentiably on an argument that needs a gradient.
        states: For each state, True if its initial value or its value after any step depends differentiably on such an
            argument.
        state_results: For each state, True if its value after any step depends differentiably on such an argument,
            and False if every step sets the state to a constant.
    """

    outputs: tuple[bool, ...]
    states: tuple[bool, ...]
    state_results: tuple[bool, ...]


def find_activity(core: StepFunction, layout: ScanLayout, samples: Sequence[Any], needs: Sequence[bool]) -> Activity:
    """Finds the outputs and states that depend differentiably, at any step, on an argument that needs a gradient.

    ``needs`` contains True for each such argument. ``samples`` contains one step's arguments, which may be fake
    tensors. A state may depend on such an argument only after several steps, so the search is repeated until it finds
    no more states.
    """
    _, states, _ = layout.split(needs)
    active = tuple(states)
    while True:
        inputs, _, lifted = layout.split(needs)
        values = _run_differentiably(core, layout, samples, (*inputs, *active, *lifted))[1]
        flags = tuple(value.requires_grad for value in values)
        outputs, after = flags[: layout.num_outputs], flags[layout.num_outputs :]
        grown = tuple(old or new for old, new in zip(active, after, strict=True))
        if grown == active:
            return Activity(outputs, states=active, state_results=after)
        active = grown


def step_vjp(core: StepFunction, layout: BackwardLayout) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns the function whose trace is the graph of the step's VJP.

    The function takes the arguments of one step (inputs, states, lifted), the present output gradients, and the
    cotangents of the active new states. It returns the gradients of the arguments for which ``layout.wanted`` is True,
    in order. It recomputes the step, because no intermediate values are saved.
    """
    scan = layout.scan
    num_values = len(layout.needs)
    receives = (*layout.output_grads, *layout.active_states)

    def vjp(*args: Any) -> tuple[torch.Tensor, ...]:
        leaves, values = _run_differentiably(core, scan, args[:num_values], layout.wanted)
        receivers = [value for value, received in zip(values, receives, strict=True) if received]
        # A value may be constant at this step, for example a state that is reset to a constant.
        pairs = [
            (value, cotangent)
            for value, cotangent in zip(receivers, args[num_values:], strict=True)
            if value.requires_grad
        ]
        if not pairs or not leaves:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        gradients = torch.autograd.grad(
            [value for value, _ in pairs],
            leaves,
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        return tuple(gradients)

    return vjp


def without_absent(vjp: fx.GraphModule, layout: BackwardLayout) -> tuple[fx.GraphModule, BackwardLayout]:
    """Removes results of a VJP that depend on no present gradient at any step. Autograd returns None for such results.

    ``vjp`` is the traced :func:`step_vjp` of ``layout``. Returns the graph without the removed results, and the
    layout without the corresponding ``needs``. The gradient of an active state remains a result of the graph.
    """
    (output,) = vjp.graph.find_nodes(op="output")
    entries: Any = output.args[0]
    sources = _find_sources(vjp.graph, len(layout.needs))
    requested = [position for position, is_requested in enumerate(layout.wanted) if is_requested]
    by_position = {position: sources[entry] for position, entry in zip(requested, entries, strict=True)}
    states = [index for index, active in enumerate(layout.active_states) if active]
    num_outputs = sum(layout.output_grads)
    present_states = [state for state, is_present in enumerate(layout.state_grads) if is_present]
    present = {*range(num_outputs), *(num_outputs + states.index(state) for state in present_states)}

    def flows(position: int) -> bool:
        result = by_position[position]
        return result is None or not present.isdisjoint(result)

    while True:
        carried = {num_outputs + i for i, state in enumerate(states) if flows(layout.scan.num_inputs + state)}
        if carried <= present:
            break
        present |= carried
    needs = tuple(need and flows(position) for position, need in enumerate(layout.needs))
    reduced = replace(layout, needs=needs)
    remaining = [entry for position, entry in zip(requested, entries, strict=True) if reduced.wanted[position]]
    if len(remaining) < len(entries):
        output.args = (tuple(remaining),)
        vjp.graph.eliminate_dead_code()
        vjp.recompile()
    return vjp, reduced


def _find_sources(graph: fx.Graph, num_values: int) -> dict[fx.Node, frozenset[int] | None]:
    """Maps each node to the positions of the cotangents on which it depends.

    A node that depends on no cotangent is mapped to the empty set if its value is known to be zeros, otherwise to None.
    """
    sources: dict[fx.Node, frozenset[int] | None] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for position, node in enumerate(placeholders):
        sources[node] = None if position < num_values else frozenset({position - num_values})
    for node in graph.nodes:
        if node in sources:
            continue
        result = frozenset[int]().union(*(sources[source] or () for source in node.all_input_nodes))
        sources[node] = result if result or is_zero(node) else None
    return sources


def _run_differentiably(
    core: StepFunction, layout: ScanLayout, samples: Sequence[Any], needs: Sequence[bool]
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Calls the core on detached samples. The samples for which ``needs`` is True require grad.

    Returns the samples that require grad, and the results of the core.
    """
    leaves = []
    arguments = []
    for sample, needs_grad in zip(samples, needs, strict=True):
        if isinstance(sample, torch.Tensor):
            sample = sample.detach()
            if needs_grad:
                leaves.append(sample.requires_grad_())
        arguments.append(sample)
    with torch.enable_grad():
        values = step_values(core(*arguments), layout.num_outputs, layout.num_states)
    return leaves, values
