"""Graphs of one step that write their results to arguments, for the compiled loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import ALIGNMENT, StepCode, compile_step
from flexsn_hop.errors import LoweringError
from flexsn_hop.loop._absent import StepVJP

__all__ = ["BLOCK", "BackwardStep", "StepCodeError", "WritingStep", "backward_step", "bind_sizes", "forward_step"]

_aten = torch.ops.aten

BLOCK = 1024
"""Maximum number of steps whose rows exist as tensors at the same time. Each of these tensors takes about 500 bytes."""


class StepCodeError(LoweringError):
    """Inductor cannot generate code for a step."""


class WritingStep:
    """A step that reads rows of sequences by their index, and writes its results to its last arguments.

    The graph of the step takes the index, the sequences, and other tensors. The graph is compiled once for each
    combination of the arguments' memory layouts.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._codes: dict[tuple[Any, ...], StepCode] = {}

    def run(self, numbers: range, sequences: Sequence[torch.Tensor], columns: Sequence[Sequence[torch.Tensor]]) -> None:
        """Runs the step for each of at most ``BLOCK`` consecutive indices.

        For an index, the step receives the row with this index from each sequence, and the next tensor of each column.
        All tensors of a column have the same layout. The sequences are dense, and time is their outermost dimension.

        Raises:
            StepCodeError: Inductor failed to compile the step.
        """
        code = self._find_code(sequences, columns)
        repeated = ([sequence] * len(numbers) for sequence in sequences)
        # This loop runs in C, because a loop in Python would take a large part of the time of a small step.
        deque(map(code, map(list, zip(numbers, *repeated, *columns, strict=True))), maxlen=0)

    def _find_code(self, sequences: Sequence[torch.Tensor], columns: Sequence[Sequence[torch.Tensor]]) -> StepCode:
        rows = [column[0] for column in columns]
        aligned = [_are_aligned(column) for column in (*((sequence,) for sequence in sequences), *columns)]
        layouts = [(sequence.shape[1:], sequence.dtype, sequence.device) for sequence in sequences]
        strides = [tensor.stride() for tensor in (*sequences, *rows)]
        layouts += [(row.shape, row.dtype, row.device) for row in rows]
        key = (*layouts, *strides, *aligned)
        if key not in self._codes:
            try:
                self._codes[key] = compile_step(self.module, sequences, rows, aligned, BLOCK)
            except Exception as error:
                reason = str(error).strip().splitlines() or [""]
                raise StepCodeError(
                    f"Inductor failed to compile the step, {type(error).__name__}: {reason[0]}"
                ) from error
        return self._codes[key]


def _are_aligned(column: Sequence[torch.Tensor]) -> bool:
    if column[0].device.type == "cpu":
        return True  # code for the CPU does not depend on alignment
    return not any(address % ALIGNMENT for address in {row.data_ptr() for row in column})


def bind_sizes(module: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    """Replaces the size arguments of a graph by their values, so that all remaining arguments are tensors.

    ``values`` contains the values of the first arguments. All later arguments are tensors.
    """
    if all(isinstance(value, torch.Tensor) for value in values):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for index, node in enumerate(module.graph.nodes):
        if node.op == "placeholder" and index < len(values) and not isinstance(values[index], torch.Tensor):
            copies[node] = values[index]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


class _Builder:
    """Builds the graph of a `WritingStep`: its arguments, the operations of the step, and the writes."""

    def __init__(self, source: fx.GraphModule) -> None:
        self._source = source
        self._graph = fx.Graph()
        self._writes: list[tuple[fx.Node, Any]] = []
        self._number = self.argument("number")

    def argument(self, kind: str) -> fx.Node:
        return self._graph.placeholder(f"{kind}_{len(self._graph.nodes)}")

    def arguments(self, kind: str, count: int) -> list[fx.Node]:
        return [self.argument(kind) for _ in range(count)]

    def row(self, sequence: fx.Node) -> fx.Node:
        """Adds a node that selects the step's row of a sequence. The graph must already have all of its arguments."""
        return self._graph.call_function(_aten.select.int, (sequence, 0, self._number))

    def inline(self, arguments: Sequence[fx.Node]) -> Sequence[Any]:
        """Adds the operations of the step for these arguments, and returns its results."""
        result: Any = self._graph.graph_copy(
            self._source.graph, dict(zip(self._source.graph.find_nodes(op="placeholder"), arguments, strict=True))
        )
        return result  # type: ignore[no-any-return]

    def add(self, left: fx.Node, right: Any) -> fx.Node:
        return self._graph.call_function(_aten.add.Tensor, (left, right))

    def write(self, destination: fx.Node, value: Any) -> None:
        self._writes.append((destination, value))

    def close(self) -> WritingStep:
        for into, value in self._writes:
            self._graph.call_function(_aten.copy_.default, (into, value))
        self._graph.output(())
        self._graph.eliminate_dead_code()
        return WritingStep(fx.GraphModule(self._source, self._graph, "WritingStep"))


def forward_step(core: fx.GraphModule, layout: ScanLayout, skipped: int = 0) -> WritingStep:
    """Builds a step that takes the arguments of ``core``, and memory for all but the first ``skipped`` results."""
    builder = _Builder(core)
    sequences = builder.arguments("sequence", layout.num_inputs)
    constants = builder.arguments("value", len(core.graph.find_nodes(op="placeholder")) - layout.num_inputs)
    (output,) = core.graph.find_nodes(op="output")
    destinations = builder.arguments("into", len(output.args[0][skipped:]))
    results = builder.inline([*map(builder.row, sequences), *constants])
    for memory, result in zip(destinations, results[skipped:], strict=True):
        builder.write(memory, result)
    return builder.close()


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """A step of the backward, for one combination of present and absent cotangents of the active states.

    Its sequences are the inputs, the states before each step, the gradients of the outputs, and the gradients of the
    sequences of states. Its other arguments are the lifted tensors, the present cotangents, and memory for three kinds
    of results: the present gradients of inputs, the present cotangents of the states before the step, and the sums of
    the present gradients of lifted tensors.

    Attributes:
        step: The step, with its graph and code.
        inputs, states, lifted: For each result of the VJP, True if the result is present.
    """

    step: WritingStep
    inputs: tuple[bool, ...]
    states: tuple[bool, ...]
    lifted: tuple[bool, ...]


def backward_step(
    vjp: StepVJP, layout: BackwardLayout, num_values: int, carried: Sequence[bool], in_sequences: Sequence[bool]
) -> BackwardStep:
    """Builds the step for one combination of present and absent gradients.

    Args:
        carried: For each active state, True if the cotangent from the later step is present.
        in_sequences: For each active state, True if the gradient of its sequence is present.
    """
    is_present = [c or s for c, s in zip(carried, in_sequences, strict=True)]
    partial = vjp.partial([*[True] * sum(layout.output_grads), *is_present])
    builder = _Builder(partial.graph)
    num_by_step = layout.scan.num_inputs + layout.scan.num_states
    values = builder.arguments("sequence", num_by_step)
    gradients = builder.arguments("gradient", sum(layout.output_grads))
    by_step = [builder.argument("gradient") if present else None for present in in_sequences]
    lifted = builder.arguments("value", num_values - num_by_step)
    cotangents = [builder.argument("cotangent") if present else None for present in carried]
    num_inputs = sum(layout.needs[: layout.scan.num_inputs])
    ends = (0, num_inputs, num_inputs + len(carried), len(partial.results))
    parts = [partial.results[first:last] for first, last in pairwise(ends)]
    into = [builder.arguments("into", sum(part)) for part in parts]

    values = [*map(builder.row, values), *lifted]
    by_step = [None if sequence is None else builder.row(sequence) for sequence in by_step]
    states = values[layout.scan.num_inputs : num_by_step]
    states = [value for value, active in zip(states, layout.active_states, strict=True) if active]
    received = [
        builder.add(left, right) if left is not None and right is not None else left or right or like
        for left, right, like in zip(cotangents, by_step, states, strict=True)
    ]
    results = builder.inline([*values, *map(builder.row, gradients), *received])
    sums = into[2]
    for memory, result in zip([memory for part in into for memory in part], results, strict=True):
        builder.write(memory, builder.add(memory, result) if memory in sums else result)
    return BackwardStep(builder.close(), *parts)
