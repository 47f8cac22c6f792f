"""The gradient of ``flex_sn_scan``: one node of the backward operator, which contains the graph of the step's VJP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import below_autograd, outside_of_tracing, trace_step
from flexsn_hop.double_backward import refuse_double_backward
from flexsn_hop.loop._arguments import StepFunction
from flexsn_hop.loop._loop import backward_samples, forward_samples
from flexsn_hop.lowering._lowering import checkpoint_interval, find_lowerings
from flexsn_hop.operator._operator import flex_sn_scan, flex_sn_scan_backward
from flexsn_hop.operator._vjp import Activity, find_activity, step_vjp, without_absent

__all__: list[str] = []

LOOP_CHECKPOINT_INTERVAL = 1
"""A loop saves every state, so that the backward recomputes no state."""

SPARE_CHECKPOINTS = 2
"""Additional rows of checkpoints if the number of steps is symbolic. See :class:`ScanLayout`."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of the two operators.

    ``checkpoints`` contains the interval of checkpoints and the number of spare rows. If the interval is 0, state
    sequences are saved instead of checkpoints.
    """

    lowering: str
    version: str
    checkpoints: tuple[int, int]


def _bind_autocast(core: StepFunction, flat_args: Sequence[Any]) -> StepFunction:
    """Returns the core with the current autocast settings, since the backward traces the core without autocast."""
    kinds = {value.device.type for value in flat_args if isinstance(value, torch.Tensor)}
    kinds = {kind for kind in kinds if torch.amp.is_autocast_available(kind)}  # excludes the meta device
    enabled = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    if not enabled:
        return core

    def run(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind, dtype in enabled.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            return core(*args)

    return run


@flex_sn_scan.py_autograd_impl
def _autograd(
    core: torch.fx.GraphModule,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: Any,
    final_state: bool,
    lowering: str,
    zero_states: tuple[bool, ...],
    checkpoints: tuple[int, int],
    version: str,
    remat: int,
) -> tuple[torch.Tensor, ...]:
    assert checkpoints == (0, 0)  # only this function adds checkpoints, below autograd
    needs = [isinstance(value, torch.Tensor) and value.requires_grad for value in flat_args]
    # A state that needs a gradient must be an argument of the backward operator, so it does not count as known zeros.
    zeros = tuple(zero and not needs[num_inputs + index] for index, zero in enumerate(zero_states))
    layout = ScanLayout(num_inputs, num_states, num_outputs, final_state, zero_states=zeros)
    with outside_of_tracing(flat_args) as fakes:
        activity = find_activity(core, layout, forward_samples(layout, fakes), needs)
    lowerings = find_lowerings(lowering, flat_args).lowerings
    if remat and final_state:
        interval = remat
    elif lowerings:
        interval = checkpoint_interval(lowerings[0], core, flat_args[: num_inputs + num_states])
    else:
        interval = LOOP_CHECKPOINT_INTERVAL if final_state else 0
    spare = SPARE_CHECKPOINTS if interval and isinstance(flat_args[0].shape[0], torch.SymInt) else 0
    options = _Options(lowering, version, (interval, spare))
    results = _ScanFunction.apply(core, layout, activity, options, *flat_args)
    return tuple(results)


_NO_SECOND = (
    "the gradient of flex_sn_scan has no gradient itself (double backward, create_graph=True) in a graph: "
    "use eager_scan, or scan without a compiler, or leave create_graph out"
)


class _ScanFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        core: torch.fx.GraphModule,
        layout: ScanLayout,
        activity: Activity,
        options: _Options,
        *flat_args: Any,
    ) -> tuple[torch.Tensor, ...]:
        interval, _ = options.checkpoints
        with below_autograd():
            results = flex_sn_scan.redispatch(
                core,
                *layout.counts,
                *flat_args,
                final_state=layout.final_state,
                lowering=options.lowering,
                zero_states=layout.zero_states,
                checkpoints=options.checkpoints,
                version=options.version,
                remat=0,  # `checkpoints` already contains the interval
            )
        num_results = layout.num_outputs + layout.num_states
        results, checkpoints = results[:num_results], results[num_results:]
        flows = (*activity.outputs, *activity.state_results)
        ctx.mark_non_differentiable(*(result for result, flow in zip(results, flows, strict=True) if not flow))
        ctx.set_materialize_grads(False)
        saved = checkpoints if interval else results[layout.num_outputs :]
        saved_args = [value for i, value in enumerate(flat_args) if i not in layout.zero_positions]
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in saved_args]
        ctx.sizes = [value for value in saved_args if not isinstance(value, torch.Tensor)]
        tensors = [value for value in saved_args if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*tensors, *saved)
        ctx.core = _bind_autocast(core, flat_args)
        ctx.layout, ctx.activity, ctx.options = layout, activity, options
        ctx.interval = interval or 1
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        tensors, sizes = iter(ctx.saved_tensors), iter(ctx.sizes)
        flat_args = [next(tensors) if is_tensor else next(sizes) for is_tensor in ctx.is_tensor]
        scan: ScanLayout = ctx.layout
        activity: Activity = ctx.activity
        output_grads = gradients[: scan.num_outputs]
        state_grads = gradients[scan.num_outputs :]
        layout = BackwardLayout(
            scan,
            needs=tuple(ctx.needs_input_grad[4:]),
            active_states=activity.states,
            output_grads=tuple(gradient is not None for gradient in output_grads),
            state_grads=tuple(gradient is not None for gradient in state_grads),
            saved_interval=ctx.interval,
        )
        received = [gradient for gradient in gradients if gradient is not None]
        args = [*flat_args, *tensors, *received]
        with outside_of_tracing(args) as fakes:
            samples = backward_samples(layout, fakes)
        vjp, layout = without_absent(trace_step(step_vjp(ctx.core, layout), samples), layout)
        if not any(layout.needs):
            return (None,) * (4 + len(layout.needs))
        results: Sequence[torch.Tensor | None]
        with torch.no_grad():
            results = flex_sn_scan_backward(
                ctx.core,
                vjp,
                *scan.counts,
                *args,
                **layout.encode(),
                lowering=ctx.options.lowering,
                version=ctx.options.version,
            )
        if torch.is_grad_enabled():  # the caller passed create_graph=True
            results = refuse_double_backward(results, args, _NO_SECOND)
        remaining = iter(results)
        return (None, None, None, None, *(next(remaining) if need else None for need in layout.needs))
