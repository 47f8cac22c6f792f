"""Makes ``torch.compile`` capture ``flex_sn_scan`` as one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_hop._layout import ScanLayout
from flexsn_hop._torch_private import (
    CapturedCall,
    CaptureHooks,
    is_transforming,
    register_with_dynamo,
    why_dynamo_cannot_capture,
)
from flexsn_hop.loop._arguments import OutputTemplateSpec, ScanCall, StepFunction, check_call, check_output_specs
from flexsn_hop.loop._eager import check_step, empty_scan, plain_scan
from flexsn_hop.lowering._builtin import through_scan, through_while_loop
from flexsn_hop.lowering._lowering import code_version, find_lowerings, requested_lowering
from flexsn_hop.operator._inspect import inspect_step

__all__ = ["complete_captured", "dynamo_hop_available", "node_options", "offer_to_dynamo", "why_dynamo_hop_unavailable"]


def dynamo_hop_available() -> bool:
    """True if ``torch.compile`` can capture :data:`flex_sn_scan` as one node with this torch.

    If the result is False, :func:`why_dynamo_hop_unavailable` returns the reason. :func:`eager_scan` works with any
    torch.

    Example:
        >>> from flexsn_hop import dynamo_hop_available
        >>> dynamo_hop_available()
        True
    """
    return why_dynamo_cannot_capture() is None


def why_dynamo_hop_unavailable() -> str | None:
    """Returns a message about names that this torch lacks, or None if :func:`dynamo_hop_available` returns True."""
    return why_dynamo_cannot_capture()


def offer_to_dynamo(name: str) -> None:
    """Registers the operator ``name`` with Dynamo if Dynamo is loaded. Repeated calls take little time."""
    register_with_dynamo(
        name, CaptureHooks(before=_check_captured_call, call_replacement=_call_form, after=_check_captured_graph)
    )


_COMPLETIONS: list[Callable[[torch.fx.GraphModule], None]] = []


def complete_captured(complete: Callable[[torch.fx.GraphModule], None]) -> None:
    """Registers a function that changes, in place, the graph of each step that Dynamo captures.

    Dynamo rejects a step that changes an object while the step runs. Such a step can call an operator instead, whose
    nodes in the graph are then replaced by the registered function.

    Example:
        >>> from flexsn_hop import complete_captured
        >>> complete_captured(lambda module: None)
    """
    _COMPLETIONS.append(complete)


def _check_captured_call(call: CapturedCall) -> dict[str, Any] | Callable[..., Any]:
    num_inputs, num_states, num_outputs, *flat_args = call.args
    zero_states = tuple(call.kwargs.get("zero_states", ()))
    core = _accept_any_arguments if call.core_fn is None else call.core_fn
    scan = ScanCall(core, ScanLayout(num_inputs, num_states, num_outputs, zero_states=zero_states), flat_args)
    check_call(scan, captured=isinstance(core, torch.fx.GraphModule))
    if scan.steps == 0:
        check_output_specs(num_outputs, call.kwargs.get("output_template_specs"))
        return empty_scan
    lowering = requested_lowering(call.kwargs.get("lowering"))
    if is_transforming():
        # A node would need a transformed step, which Dynamo cannot capture. The unrolled loop is long, but correct.
        return plain_scan
    replacement = {"scan": through_scan, "while_loop": through_while_loop}.get(lowering)
    if replacement is not None:
        return replacement
    remat = call.kwargs.get("remat") or 0
    return node_options(flat_args, call.kwargs.get("final_state", False), lowering, zero_states, remat)


def node_options(
    flat_args: Sequence[Any],
    final_state: bool,
    lowering: str | None = None,
    zero_states: tuple[bool, ...] = (),
    remat: int = 0,
) -> dict[str, Any]:
    """Returns the keyword arguments of the operator's node. Raises an error if the lowering is unavailable."""
    lowering = requested_lowering(lowering)
    find_lowerings(lowering, flat_args)
    return {
        "final_state": final_state,
        "checkpoints": (0, 0),
        "zero_states": zero_states,
        "remat": remat,
        "lowering": lowering,
        "version": code_version(),
    }


def _call_form(
    form: Callable[[ScanCall], tuple[torch.Tensor, ...]],
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
    final_state: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Calls another form of the scan with the arguments of the operator."""
    layout = ScanLayout(num_inputs, num_states, num_outputs, final_state)
    return form(ScanCall(core_fn, layout, flat_args, output_template_specs))


def _accept_any_arguments(*args: Any) -> None:
    """Replaces, in the checks of a call, a core whose parameters Dynamo cannot determine.

    If the core does not accept its arguments, Dynamo raises an error when it traces the core.
    """


def _check_captured_graph(
    call: CapturedCall, graph: torch.fx.GraphModule, samples: Sequence[Any], returned: Any
) -> None:
    num_inputs, num_states, num_outputs = call.args[:3]
    states = samples[num_inputs : num_inputs + num_states]
    check_step(returned, states, num_outputs, step=0)
    for complete in _COMPLETIONS:
        complete(graph)
    inspect_step(graph, samples)
