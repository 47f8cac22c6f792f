"""Makes one VJP valid for all steps, although gradients of some new states are absent at the first backward step.

Otherwise, the first backward step would need a separate VJP, with separate kernels and launches. A VJP with a flag is
valid for all steps. If a value depends on absent gradients alone, the VJP replaces the value with zero where the value
is combined with other values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.passes._presence import Selection, origins_of
from flexsn_graph.staging._staged_step import Phase, Stage, StagedStep, View

_CAME = Port(Role.CAME_STATE, 0)
_PRESENT = Port(Role.GRAD_OUTPUT, 0)


def absent_at_first(vjp: StagedStep, absent: Collection[Port]) -> StagedStep | None:
    """Adds a flag to a VJP, `Port(Role.CAME_STATE, 0)`, which is True if the gradients `absent` are present at a step.

    Args:
        absent: the gradients of new states that are absent at the first step of the backward. At that step, they have
            to be passed as zeros.

    Returns:
        The new VJP. `None` if a product or a carried value is computed from these gradients alone, because no stage can
        replace such a value with zero.
    """
    absent_ports = frozenset(absent)
    factors = [term.values for term in vjp.terms if term.op is not None]
    read = {view.source for views in (*(part.reads for part in vjp.parts), *factors) for view in views}
    present = {port for port in vjp.arguments if port.role in (Role.GRAD_OUTPUT, Role.GRAD_STATE)} - absent_ports
    parts = []
    for part in vjp.parts:
        reads_absent = not absent_ports.isdisjoint(view.source for view in part.reads)
        if isinstance(part, Stage):
            if reads_absent and part.phase is not Phase.LOOP:
                return None
            part, present_results, zero_results = _add_selections(part, absent_ports, present)
            if any(port in read or port.role not in (Role.OPERAND, Role.GRAD_INPUT) for port in zero_results):
                return None
            present.update(present_results)
        elif reads_absent:
            return None
        elif any(view.source in present for view in part.reads):
            present.add(part.result.source)
        parts.append(part)
    if any(view.source in absent_ports for term in vjp.terms for view in term.values):
        return None
    values = {**vjp.values, _CAME: ((), torch.bool)}
    return replace(vjp, arguments=(*vjp.arguments, _CAME), parts=tuple(parts), values=values, absent=absent_ports)


def _add_selections(stage: Stage, absent: frozenset[Port], present: set[Port]) -> tuple[Stage, list[Port], list[Port]]:
    """The stage with selections, its results that depend on present gradients, and its results that are zeros."""
    graph = stage.graph

    def change_role(port: Port) -> Port:
        source = stage.reads[port.index].source if port.role is Role.INPUT else port
        role = Role.GRAD_STATE if source in absent else Role.GRAD_OUTPUT if source in present else port.role
        return Port(role, port.index)

    origins_by_node = origins_of(replace(graph, arguments=tuple(map(change_role, graph.arguments))))
    origins = {
        node: frozenset(Port(port.role, 0) for port in origins_of_value)
        for node, origins_of_value in origins_by_node.items()
    }
    written = [(origins.get(node), view.source) for node, view in zip(graph.entries, stage.writes, strict=True)]
    present_results = [port for origins_of_value, port in written if origins_of_value and _PRESENT in origins_of_value]
    zero_results = [port for origins_of_value, port in written if origins_of_value and _PRESENT not in origins_of_value]
    selection = Selection(graph, origins, lambda origins_of_value: _PRESENT in origins_of_value)
    if not selection.states:
        return stage, present_results, zero_results
    flag = Port(Role.INPUT, len(stage.reads))
    selecting = replace(graph, graph=selection.graph([_CAME]), arguments=(*graph.arguments, flag))
    return (
        replace(stage, graph=selecting, reads=(*stage.reads, View(_CAME, (), (), torch.bool))),
        present_results,
        zero_results,
    )
