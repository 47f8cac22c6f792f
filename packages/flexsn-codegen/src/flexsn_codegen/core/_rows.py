"""Splits the graph of a function that reduces rows into stages. Each stage is a function of one element.

A stage computes the operands of the next reductions, or results of the function, from the arguments and from the
results of earlier reductions. If two stages need the same value, each of them computes the value. The operands of the
value are still in registers, or are read again from the nearest cache. If the target can keep values of a row
(`Target.keeps_rows`), the result of a slow op is only computed in the first stage that needs the result, and is kept
for the later stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from flexsn_codegen.core._core import emit_core
from flexsn_codegen.core._once import is_slow
from flexsn_codegen.errors import UnsupportedOpError
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import CoreSource, RowStage, identifier
from flexsn_codegen.targets import Target
from flexsn_graph import ROW_OPS, Role, StepGraph, ports


def emit_rows(
    step: StepGraph, name: str, whole: Sequence[bool], *, numerics: Numerics, target: Target, numbers: str | None
) -> CoreSource:
    """Writes a function that reduces rows.

    Args:
        step: a graph that contains `ROW_OPS`. All arguments are inputs, and all results are outputs.
        name: start of the function's name.
        whole: for each output, True if the output has one element per element of a row, False if it has one element per
            row.
        numbers: see `emit_core`.

    Raises:
        UnsupportedOpError: the target has no kernels that reduce rows.
    """
    if not target.reduces_rows:
        raise UnsupportedOpError(f"{name} reduces rows, for which {target.name} has no kernels.", "row_sum")
    levels = _compute_levels(step.graph)
    reduced: list[fx.Node] = []
    kept_nodes: list[fx.Node] = []
    stages: list[RowStage] = []
    reductions = [
        [node for node, node_level in levels.items() if node.target in ROW_OPS and node_level == level]
        for level in range(1, max(levels.values(), default=0) + 1)
    ]
    computed = [[_get_operand(node) for node in level_nodes] for level_nodes in reductions] + [
        [entry for entry, is_whole in zip(step.entries, whole, strict=True) if is_whole]
    ]

    def core_of(nodes: Sequence[fx.Node], *, of_elements: bool = True) -> CoreSource:
        return emit_core(
            _cut_out(step, nodes, reduced, kept_nodes if of_elements else []),
            name,
            prune=True,
            precision=numerics.precision,
            fast_math=numerics.fast_math,
            target=target,
            numbers=None if numbers is None else f"{numbers}_{len(stages)}",
        )

    for level, level_nodes in enumerate(reductions):
        newly_kept = _select_kept(computed[level:], reduced, kept_nodes) if target.keeps_rows else []
        core = core_of([*computed[level], *newly_kept])
        kinds = tuple((node.target, node.meta["val"].dtype) for node in level_nodes)
        saved = ports(Role.SAVED, len(kept_nodes) + len(newly_kept))[len(kept_nodes) :]
        values = tuple(zip(saved, (node.meta["val"].dtype for node in newly_kept), strict=True))
        stages.append(RowStage(core, kinds, kept_results=values))  # type: ignore[arg-type]
        reduced += level_nodes
        kept_nodes += newly_kept
    for is_per_element in (True, False):
        indices = [i for i, is_whole in enumerate(whole) if is_whole == is_per_element]
        if indices:
            core = core_of([step.entries[i] for i in indices], of_elements=is_per_element)
            dtypes = tuple(step.entries[i].meta["val"].dtype for i in indices)
            stages.append(RowStage(core, (), tuple(step.results[i] for i in indices), is_per_element, dtypes))
    used = {port for stage in stages for port in stage.core.arguments if port.role is Role.INPUT}
    arguments = tuple(port for port in step.arguments if port in used) or step.arguments[:1]
    source = "\n\n".join(dict.fromkeys(stage.core.source for stage in stages))
    kinds_text = [(s.core.name, s.reductions, s.written, s.whole, s.core.arguments, s.kept_results) for s in stages]
    digest = hashlib.sha256(repr(kinds_text).encode()).hexdigest()[:12]
    all_numbers = tuple(number for stage in stages for number in stage.core.numbers)
    full_name = f"{identifier(name, reserved=target.reserved)}_{digest}"
    return CoreSource(full_name, source, arguments, step.results, target, all_numbers, stages=tuple(stages))


def _get_operand(node: fx.Node) -> fx.Node:
    (value,) = node.all_input_nodes
    return value


def _compute_levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node, the largest number of reductions on a path that ends at this node."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        earlier = max((levels[n] for n in node.all_input_nodes), default=0)
        levels[node] = earlier + (node.target in ROW_OPS)
    return levels


def _select_kept(
    stages: Sequence[Sequence[fx.Node]], reduced: Sequence[fx.Node], kept_nodes: Sequence[fx.Node]
) -> list[fx.Node]:
    """The nodes whose values the first of several stages keeps for the other stages, because recomputing is slow.

    Args:
        stages: for each stage, the nodes that are operands of its reductions or results of the function.
        reduced: the reductions that earlier stages have computed.
        kept_nodes: the nodes that earlier stages have kept.
    """
    available = {*reduced, *kept_nodes}
    ends = {node for nodes in stages[1:] for node in nodes}
    needed_later = _find_dependencies(ends, available)
    shared = _find_dependencies(stages[0], available) & needed_later
    slow: set[fx.Node] = set()
    results: list[fx.Node] = []
    of_elements = {*kept_nodes, *(node for node in shared if node.op == "placeholder")}
    for node in stages[0][0].graph.nodes:
        if node not in shared or node.op != "call_function":
            continue
        if of_elements.isdisjoint(node.all_input_nodes):
            continue  # the value is the same for all elements of the row
        of_elements.add(node)
        if is_slow(node) or not slow.isdisjoint(node.all_input_nodes):
            slow.add(node)
        is_read = node in ends or any(user in needed_later and user not in shared for user in node.users)
        if node in slow and is_read and node.meta["val"].dtype.is_floating_point:
            results.append(node)
            slow.discard(node)
    return results


def _find_dependencies(nodes: Iterable[fx.Node], available: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and all nodes on which they depend.

    The search stops at reductions and at the nodes in `available`, which are excluded.
    """
    results: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in results and node not in available and node.target not in ROW_OPS:
            results.add(node)
            pending += node.all_input_nodes
    return results


def _cut_out(
    step: StepGraph, nodes: Sequence[fx.Node], reduced: Sequence[fx.Node], kept_nodes: Sequence[fx.Node]
) -> StepGraph:
    """The part of a step that computes some nodes from the step's inputs, earlier reductions, and kept values."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lifted, saved = ports(Role.LIFTED, len(reduced)), ports(Role.SAVED, len(kept_nodes))
    earlier = [*zip(lifted, reduced, strict=True), *zip(saved, kept_nodes, strict=True)]
    for port, node in [*step.placeholders.items(), *earlier]:
        copies[node] = graph.placeholder(port.name)
        copies[node].meta["val"] = node.meta["val"]
    needed = set(nodes)
    for node in reversed(list(step.graph.nodes)):
        if node in needed and node not in copies:
            needed.update(node.all_input_nodes)
    for node in step.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results: Any = tuple(copies[node] for node in nodes)
    graph.output(results)
    return StepGraph(graph, (*step.arguments, *lifted, *saved), ports(Role.OUTPUT, len(nodes)), {})
