"""The loop as an ordinary custom operator that takes the graphs of a step as text.

A compiler without support for the scan can call this operator. Inductor calls this operator if no kernel can run the
scan, or if a loop is requested.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
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
from flexsn_hop.lowering._compiled_loop import CompiledBackward, CompiledForward, has_no_elements
from flexsn_hop.lowering._step_graphs import StepCodeError
from flexsn_hop.text import from_text, merged, read_graph, read_layout, to_text, write_graph, write_layout

__all__ = ["encode_program", "run_scan"]

_logger = logging.getLogger("flexsn_hop")

_SCHEMA = "(str program, Tensor[] tensors, SymInt[] sizes, int[] size_positions) -> Tensor[]"


class _Program:
    """The forward operator or the backward operator, with its graphs and its layout."""

    def __init__(
        self, graphs: tuple[torch.fx.GraphModule, ...], layout: ScanLayout | BackwardLayout, lowering: str
    ) -> None:
        self.graphs = graphs
        self.layout = layout
        self._lowering = lowering
        self._compiled: CompiledForward | CompiledBackward | None = None
        if lowering == "loop":
            return
        if isinstance(layout, BackwardLayout):
            self._compiled = CompiledBackward(graphs[0], graphs[1], layout)
        else:
            self._compiled = CompiledForward(graphs[0], layout)

    def run(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if self._compiled is not None and not has_no_elements(self.layout, args):
            try:
                with torch.no_grad():
                    return self._compiled(args)
            except StepCodeError as error:
                self._refuse(str(error))
                self._compiled = None  # otherwise, each call would try to compile
        if isinstance(self.layout, BackwardLayout):
            return backward_loop(self.graphs[0], self.graphs[1], self.layout, args)
        return forward_loop(self.graphs[0], self.layout, args)

    def _refuse(self, reason: str) -> None:
        """Logs the reason why steps run operator by operator, or raises an error if compiled steps are required."""
        if self._lowering == "compiled_loop":
            raise StepCodeError(
                f"the lowering 'compiled_loop' is not available: {reason}. Use 'auto' or 'loop' instead"
            )
        _log_once(f"a compiled scan runs operator by operator: {reason} (lowering='loop' requests this)")

    def shapes(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if isinstance(self.layout, BackwardLayout):
            samples = backward_samples(self.layout, args)
            return backward_shapes(self.graphs[1], self.layout, args, samples)
        return forward_shapes(self.graphs[0], self.layout, args)


@functools.cache
def _log_once(message: str) -> None:
    _logger.warning(message)


def encode_program(graphs: Sequence[torch.fx.GraphModule], layout: ScanLayout | BackwardLayout, lowering: str) -> str:
    """Returns the argument ``program`` of :func:`run_scan`: the layout and the graphs as text.

    Args:
        lowering: ``"compiled_loop"`` for Inductor's code for the steps, ``"loop"`` for single operators, or
            ``"auto"`` for the first of these two that is available.

    Raises:
        LoweringError: A graph contains an object that cannot be written as text.
    """
    written = [write_graph(graph) for graph in graphs]
    return to_text({"layout": write_layout(layout), "graphs": written, "lowering": lowering})


@functools.lru_cache(maxsize=512)
def _decode(program: str) -> _Program:
    content = from_text(program)
    graphs = tuple(map(read_graph, content["graphs"]))
    return _Program(graphs, read_layout(content["layout"]), content["lowering"])


def _run(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    return list(_decode(program).run(merged(tensors, sizes, size_positions)))


def _find_shapes(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    # Bypasses the cache, because the constants of this graph are fake tensors.
    with numbers_of_a_step(tensors):
        return list(_decode.__wrapped__(program).shapes(merged(tensors, sizes, size_positions)))


# The loop accepts any strides, so compilers need not copy inputs to a certain layout.
torch.library.define("flexsn_hop::run_scan", _SCHEMA, tags=(torch.Tag.flexible_layout,))
torch.library.impl("flexsn_hop::run_scan", "CompositeExplicitAutograd", _run)
torch.library.register_fake("flexsn_hop::run_scan", _find_shapes)

run_scan = torch.ops.flexsn_hop.run_scan.default
