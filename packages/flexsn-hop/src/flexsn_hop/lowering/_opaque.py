"""The loop as an ordinary custom operator, which carries the step's graph as text.

A compiler that knows nothing of the scan can call it: Inductor does, where no kernel is registered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import numbers_of_a_step
from flexsn_hop.loop._loop import (
    backward_loop,
    backward_samples,
    backward_shapes,
    forward_loop,
    forward_shapes,
)
from flexsn_hop.text import from_text, merged, read_graph, read_layout, to_text, write_graph, write_layout

__all__ = ["encode_program", "run_scan"]

_SCHEMA = "(str program, Tensor[] tensors, SymInt[] sizes, int[] size_positions) -> Tensor[]"


@dataclass(frozen=True)
class _Program:
    """One of the two operators with its graphs, ready to be called."""

    graphs: tuple[torch.fx.GraphModule, ...]
    layout: ScanLayout | BackwardLayout

    def run(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if isinstance(self.layout, BackwardLayout):
            return backward_loop(self.graphs[0], self.graphs[1], self.layout, args)
        return forward_loop(self.graphs[0], self.layout, args)

    def shapes(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if isinstance(self.layout, BackwardLayout):
            samples = backward_samples(self.layout, args)
            return backward_shapes(self.graphs[1], self.layout, args, samples)
        return forward_shapes(self.graphs[0], self.layout, args)


def encode_program(graphs: Sequence[torch.fx.GraphModule], layout: ScanLayout | BackwardLayout) -> str:
    """The text that :func:`run_scan` takes: layout and nodes of the graphs.

    Raises:
        LoweringError: A graph holds something that has no text.
    """
    return to_text({"layout": write_layout(layout), "graphs": [write_graph(graph) for graph in graphs]})


@functools.lru_cache(maxsize=512)
def _decode(program: str) -> _Program:
    content = from_text(program)
    return _Program(tuple(map(read_graph, content["graphs"])), read_layout(content["layout"]))


def _run(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    return list(_decode(program).run(merged(tensors, sizes, size_positions)))


def _shapes(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    # Not from the cache: the graph's constants are fake here.
    with numbers_of_a_step(tensors):
        return list(_decode.__wrapped__(program).shapes(merged(tensors, sizes, size_positions)))


# The loop reads any strides, so that the compiler need not copy an input to a certain layout.
torch.library.define("flexsn_hop::run_scan", _SCHEMA, tags=(torch.Tag.flexible_layout,))
torch.library.impl("flexsn_hop::run_scan", "CompositeExplicitAutograd", _run)
torch.library.register_fake("flexsn_hop::run_scan", _shapes)

run_scan = torch.ops.flexsn_hop.run_scan.default
