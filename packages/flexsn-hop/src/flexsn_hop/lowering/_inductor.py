"""Lowers the two operators in Inductor's graphs, to kernel launches of a registered lowering or to the loop."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import InductorCall
from flexsn_hop.callers import warn
from flexsn_hop.errors import LoweringError
from flexsn_hop.loop._eager import describe
from flexsn_hop.lowering._functional import without_writes
from flexsn_hop.lowering._lowering import (
    LOWERING_VARIABLE,
    NO_KERNELS,
    ScanLowering,
    find_lowerings,
    naming,
    reasons,
    requested_lowering,
)
from flexsn_hop.lowering._masks import masks_as_conditions
from flexsn_hop.lowering._opaque import encode_program, run_scan
from flexsn_hop.lowering._padding import without_padding

__all__ = ["lower"]

_logger = logging.getLogger("flexsn_hop")


def lower(
    call: InductorCall, layout: ScanLayout | BackwardLayout, name: str | None, num_flat_args: int
) -> Sequence[Any]:
    """Lowers one call of an operator.

    ``name`` is the requested lowering. The first ``num_flat_args`` arguments after the graphs decide which lowerings
    are available.
    """
    call = replace(call, graphs=tuple(without_padding(masks_as_conditions(without_writes(g))) for g in call.graphs))
    result = find_lowerings(requested_lowering(name), call.examples[:num_flat_args])
    refused = dict(result.refused)
    for lowering in result.lowerings:
        try:
            return _lower_with(lowering, call, layout)
        except NotImplementedError as error:
            refused[lowering.name] = str(error)
    if not result.may_be_the_loop:
        raise LoweringError(
            f"the lowering {result.requested!r} cannot compile this core: {reasons(refused)} "
            "Use 'auto' or 'loop' instead"
        )
    if result.lowerings and not _list_attributes(call):
        warn(f"a compiled scan runs as a loop, without kernels: {reasons(refused)}")
    elif result.requested == "auto":
        _log_once(f"a compiled scan runs as a loop, without kernels: {reasons(refused) or NO_KERNELS}")
    return _lower_to_loop(call, layout, result.requested)


@functools.cache
def _log_once(message: str) -> None:
    """Logs once that a scan runs as a loop. The loop may be intended, so no warning is issued."""
    _logger.warning("%s (lowering='loop', or %s=loop, selects the loop)", message, LOWERING_VARIABLE)


def _lower_with(lowering: ScanLowering, call: InductorCall, layout: ScanLayout | BackwardLayout) -> Sequence[Any]:
    attributes = _list_attributes(call)
    if any(isinstance(attribute, torch.Tensor) for attribute in attributes):
        raise NotImplementedError(
            "the core creates a constant tensor, which only the loop supports: create it outside of the core."
        )
    if attributes:
        raise NotImplementedError(
            "the core calls an operator that contains graphs, such as scan, cond or while_loop, which only the "
            "loop supports."
        )

    direction = "backward" if isinstance(layout, BackwardLayout) else "forward"
    description = f"{direction} of the lowering {lowering.name!r}"

    def run(*args: Any) -> Sequence[torch.Tensor]:
        with naming(lowering, direction):
            if isinstance(layout, BackwardLayout):
                results = tuple(lowering.backward(call.graphs[0], call.graphs[1], layout, args))
            else:
                results = tuple(lowering.forward(call.graphs[0], layout, args))
        _check_results(description, results, call.results)
        return results

    return call.inline(run, description, unread=() if isinstance(layout, BackwardLayout) else layout.zero_positions)


def _check_results(description: str, results: Sequence[Any], expected: Sequence[torch.Tensor]) -> None:
    """Checks that results have the properties that the rest of the graph relies on.

    Raises:
        LoweringError: A result differs.
    """
    if len(results) != len(expected):
        raise LoweringError(f"{description} returned {len(results)} results; the layout requires {len(expected)}")
    for index, (result, like) in enumerate(zip(results, expected, strict=True)):
        if not isinstance(result, torch.Tensor):
            raise LoweringError(
                f"{description} returned a {type(result).__name__} as result {index}; it must be a torch.Tensor"
            )
        sizes = zip(result.shape, like.shape, strict=False)
        if (
            result.dim() != like.dim()
            or any(type(size) is type(right) is int and size != right for size, right in sizes)
            or (result.dtype, result.device) != (like.dtype, like.device)
        ):
            raise LoweringError(
                f"{description} returned {describe(result)} as result {index}; it must be {describe(like)}"
            )


def _list_attributes(call: InductorCall) -> list[Any]:
    """Returns the attributes of the graphs: constant tensors, and graphs that operators contain."""
    return [
        operator.attrgetter(str(node.target))(graph)
        for graph in call.graphs
        for node in graph.graph.find_nodes(op="get_attr")
    ]


def _lower_to_loop(call: InductorCall, layout: ScanLayout | BackwardLayout, requested: str) -> Sequence[Any]:
    if call.is_ahead_of_time:
        warn(
            "a program that is compiled ahead of time calls a scan's loop, which is Python: it runs only in processes "
            f"that have imported flexsn_hop. With {LOWERING_VARIABLE}=scan in the environment and torch "
            "2.15, torch.export.export records torch's own scan instead, and the program needs no Python",
        )
    sizes = [index for index, example in enumerate(call.examples) if not isinstance(example, torch.Tensor)]
    tensors = [value for index, value in enumerate(call.args) if index not in sizes]
    return call.fall_back_to(
        run_scan,
        encode_program(call.graphs, layout, requested),
        tensors,
        [call.args[index] for index in sizes],
        sizes,
    )
