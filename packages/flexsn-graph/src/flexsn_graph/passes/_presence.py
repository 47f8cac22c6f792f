"""Tracks the gradients that are present at each step, for VJPs in which an absent gradient differs from zero.

A final state on which no loss depends has no gradient, so autograd does not call the formulas that would use the
gradient. A kernel uses a zero instead, and zero times an infinite derivative is NaN. If a product can become NaN in
this way, the VJP takes a flag for each new state, which is True if the gradient of the state is present. The VJP
replaces a value with zero if the value depends on absent gradients alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._step_graph import StepGraph

_prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Flag:
    """The presence of the gradient of a new state. The flag is the argument `Port(Role.CAME_STATE, state)` of a VJP.

    Attributes:
        given: True if the gradient is present at the last step.
        always: True if the gradient is present at every step before the last step.
        states: if `always` is False, the gradient is present at a step if the gradient of one of these states is
            present at the following step.
    """

    state: int
    given: bool
    always: bool
    states: tuple[int, ...]


class Presence:
    """The presence of gradients in a backward scan.

    Args:
        vjp: the VJP of the step.
        num_inputs, num_states: numbers of inputs and of states.
        given: for each state, True if it has a gradient from outside of the scan.
        every_step: True if gradients from outside exist at every step, False if they exist at the last step only.

    Attributes:
        flags: the flags that `with_flags` adds to the VJP's arguments. Empty if zeros can replace absent gradients.
    """

    def __init__(
        self, vjp: StepGraph, num_inputs: int, num_states: int, given: Sequence[bool], *, every_step: bool
    ) -> None:
        self._vjp = vjp
        self._present_at_end = frozenset(i for i in range(num_states) if given[i])
        self._from_outside = self._present_at_end if every_step else frozenset[int]()
        self._origins = origins_of(vjp)
        results = vjp.entries
        # For each primal: the gradients on which its gradient depends, or `None` if it has no gradient.
        self._origins_by_primal = [
            None if p is None else self._origins.get(results[p], frozenset()) for p in vjp.gradients
        ]
        self._origins_by_state = self._origins_by_primal[num_inputs : num_inputs + num_states]
        self._first_state, self._num_states = num_inputs, num_states
        self._always_present = self._find_always_present()
        self._selected = Selection(vjp, self._origins, self._is_always_present)
        self.flags = self._list_flags()

    def flows(self, num_steps: int) -> tuple[bool, ...]:
        """For each of `[*inputs, *states, *lifted]`, True if it receives a gradient within `num_steps >= 1` steps."""
        present = self._present_at_end
        reached = [False] * len(self._origins_by_primal)
        step_by_present: dict[frozenset[int], int] = {}
        step = 0
        while step < num_steps:
            if present in step_by_present:  # from this step on, the sequence repeats
                step = num_steps - (num_steps - step) % (step - step_by_present[present])
                step_by_present = {}
                if step >= num_steps:
                    break
            step_by_present[present] = step
            reached = [
                was_reached or self._is_present(origins, present)
                for was_reached, origins in zip(reached, self._origins_by_primal, strict=True)
            ]
            present = self._find_previous(present)
            step += 1
        states = (i in present for i in range(self._num_states))
        first_lifted = self._first_state + self._num_states
        return (*reached[: self._first_state], *states, *reached[first_lifted:])

    def with_flags(self) -> StepGraph:
        """The VJP with `flags` as additional arguments after all others."""
        flags = [Port(Role.CAME_STATE, flag.state) for flag in self.flags]
        return replace(self._vjp, graph=self._selected.graph(flags), arguments=(*self._vjp.arguments, *flags))

    def _is_present(self, origins: frozenset[Port] | None, present: Collection[int]) -> bool:
        if origins is None:
            return False
        return not origins or any(p.role is Role.GRAD_OUTPUT or p.index in present for p in origins)

    def _find_previous(self, present: frozenset[int]) -> frozenset[int]:
        """The states with gradients at a step, if the states in `present` have gradients at the following step."""
        carried = {i for i, origins in enumerate(self._origins_by_state) if self._is_present(origins, present)}
        return self._from_outside | carried

    def _find_always_present(self) -> frozenset[int]:
        """The states whose gradients are present at every step."""
        present = self._present_at_end
        while True:
            fewer = present & self._find_previous(present)
            if fewer == present:
                return present
            present = fewer

    def _is_always_present(self, origins: frozenset[Port]) -> bool:
        return self._is_present(origins, self._always_present)

    def _list_flags(self) -> tuple[Flag, ...]:
        needed: set[int] = set()
        waiting = set(self._selected.states)
        flags: dict[int, Flag] = {}
        while waiting:
            state = waiting.pop()
            needed.add(state)
            origins = self._origins_by_state[state]
            always = state in self._from_outside or (origins is not None and self._is_always_present(origins))
            previous = () if always or origins is None else tuple(sorted(port.index for port in origins))
            flags[state] = Flag(state, state in self._present_at_end, always, previous)
            waiting |= set(previous) - needed
        return tuple(flags[state] for state in sorted(flags))


def origins_of(vjp: StepGraph) -> dict[fx.Node, frozenset[Port]]:
    """Maps each value to the gradients on which it depends."""
    roles = (Role.GRAD_OUTPUT, Role.GRAD_STATE)
    origins = {node: frozenset({port}) for port, node in vjp.placeholders.items() if port.role in roles}
    for node in vjp.graph.nodes:
        if node.op == "call_function":
            result = frozenset[Port]().union(*(origins.get(a, frozenset()) for a in node.all_input_nodes))
            if result:
                origins[node] = result
    return origins


class Selection:
    """The selections by flags in a VJP.

    A value that depends on absent gradients alone counts as zero where it is combined with a value that depends on
    another gradient, and where it is returned. There, the VJP selects a zero, unless the value is zero anyway. An
    absent gradient is zero, and so is its product with a number.

    Attributes:
        states: states whose flags control a selection.
    """

    def __init__(self, vjp: StepGraph, origins: Mapping[fx.Node, frozenset[Port]], is_present: Any) -> None:
        self._graph = graph = vjp.graph
        self._origins = origins
        self._finite = _find_finite_values(graph)
        self._zero: set[fx.Node] = set()  # values that are zero if all gradients on which they depend are absent
        self._selecting_users: dict[fx.Node, set[fx.Node]] = {}  # maps a value to the nodes that use the selected value
        self._is_always_present = is_present
        for node in graph.nodes:
            node_origins = origins.get(node)
            for argument in node.all_input_nodes:
                argument_origins = origins.get(argument)
                if (
                    argument_origins
                    and argument_origins != node_origins
                    and not is_present(argument_origins)
                    and argument not in self._zero
                ):
                    self._selecting_users.setdefault(argument, set()).add(node)
            if node_origins and not is_present(node_origins) and self._stays_zero(node):
                self._zero.add(node)
        self.states = {port.index for node in self._selecting_users for port in origins[node]}

    def graph(self, flags: Sequence[Port]) -> fx.Graph:
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        selected: dict[fx.Node, fx.Node] = {}
        flag_by_state: dict[int, fx.Node] = {}
        combined: dict[tuple[int, ...], fx.Node] = {}
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            new[node] = graph.node_copy(node)
        for port in flags:
            flag_by_state[port.index] = graph.placeholder(port.name)
            flag_by_state[port.index].meta["val"] = torch.empty((), dtype=torch.bool, device="meta")

        def select(node: fx.Node) -> fx.Node:
            states = tuple(sorted(port.index for port in self._origins[node]))
            for i, state in enumerate(states):
                key = states[: i + 1]
                if key not in combined:
                    combined[key] = (
                        flag_by_state[state]
                        if i == 0
                        else _create_call(
                            graph,
                            _prims.bitwise_or.default,
                            (combined[key[:-1]], flag_by_state[state]),
                            flag_by_state[state],
                        )
                    )
            if node not in selected:
                selected[node] = _create_call(graph, _prims.where.default, (combined[states], new[node], 0.0), node)
            return selected[node]

        for node in self._graph.nodes:
            if node.op == "placeholder":
                continue

            def argument(value: fx.Node, node: fx.Node = node) -> fx.Node:
                return select(value) if node in self._selecting_users.get(value, ()) else new[value]

            if node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], argument))
            else:
                arguments = {value: argument(value) for value in node.all_input_nodes}
                new[node] = graph.node_copy(node, arguments.__getitem__)
        return graph

    def _stays_zero(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        target: Any = node.target
        origins = self._origins[node]
        operands = [a for a in node.args if isinstance(a, fx.Node) and a in self._origins]
        # An operand is also zero for this node if the node reads the selected value.
        if not all(a in self._zero or node in self._selecting_users.get(a, ()) for a in operands):
            return False
        if target in (_prims.neg.default, _prims.convert_element_type.default):
            return True
        if target in (_prims.add.default, _prims.sub.default):
            return len(operands) == len(node.args)
        if target is _prims.mul.default:
            return all(a in operands or self._is_finite(a) for a in node.args) and len(operands) == 1
        if target is _prims.div.default:
            divisor = node.args[1]
            return node.args[0] in operands and isinstance(divisor, int | float) and _is_divisor(divisor)
        if target is _prims.where.default:
            return all(a in operands or _is_zero(a) for a in node.args[1:])
        return not origins

    def _is_finite(self, value: Any) -> bool:
        return math.isfinite(value) if isinstance(value, int | float) else value in self._finite


def _find_finite_values(graph: fx.Graph) -> set[fx.Node]:
    """Values that are finite for all arguments: masks, numbers, and their sums and products."""
    finite: set[fx.Node] = set()
    closed = (
        *(_prims.add.default, _prims.sub.default, _prims.mul.default, _prims.neg.default, _prims.abs.default),
        *(_prims.where.default, _prims.convert_element_type.default, _prims.minimum.default, _prims.maximum.default),
    )
    for node in graph.nodes:
        value = node.meta.get("val")
        dtype = getattr(value, "dtype", None)
        if dtype is not None and not dtype.is_floating_point:
            finite.add(node)
        elif node.target is _prims.scalar_tensor.default:
            if math.isfinite(node.args[0]):
                finite.add(node)
        elif node.op == "call_function" and node.target in closed:
            operands = node.args[1:] if node.target is _prims.where.default else node.args
            values = [a for a in operands if isinstance(a, fx.Node | int | float)]
            if all(a in finite if isinstance(a, fx.Node) else abs(a) < 1e6 for a in values):
                finite.add(node)
    return finite


def _is_divisor(value: float) -> bool:
    return value != 0 and not math.isnan(value)


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float) and value == 0


def _create_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = like.meta["val"]
    return node
