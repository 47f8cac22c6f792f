"""Graphs of any pointwise function: for inference, and as a forward and backward pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from flexsn_graph._torch_private import undisturbed
from flexsn_graph.errors import CoreReturnError, RequiresGradError
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.lowering._lowering import lower, split_joint
from flexsn_graph.lowering._normalize import normalize
from flexsn_graph.lowering._strides import broadcast_shapes
from flexsn_graph.tracing._core import as_tensors, unwrap_compiled
from flexsn_graph.tracing._tracer import Tracer


def generate_inference_graph(fn: Callable[..., Any], example_inputs: tuple[Tensor, ...]) -> fx.Graph:
    """Traces `fn` to the closed op set, without gradients.

    Args:
        fn: a pointwise function of tensors that returns a tensor, or a list or tuple of tensors.
        example_inputs: tensors of any shape and dtype, or fake tensors. The tensors are neither changed nor kept.

    Returns:
        `[*example_inputs, *captured tensors] -> [*results]`. The placeholder of a captured tensor has the tensor as
        `meta["captured"]`, and its layout as `meta["layout"]` (a `LiftedLayout`, or `None` if no op reads the tensor).

    Raises:
        TraceError: `fn` returns neither a tensor nor a list or tuple of tensors.
        UnsupportedCoreError: `fn` does something that a kernel cannot do. The message names the op and the line.
    """
    with undisturbed():
        tracer = Tracer(unwrap_compiled(fn), example_inputs, as_tensors)
        lowered, layouts = tracer.lower(tracer.record_forward(), _find_common_shape(tracer))
        return _annotate_captured(normalize(lowered, _name_primals(tracer)), tracer, layouts)


def generate_forward_and_backward_graph(
    fn: Callable[..., Any],
    example_inputs: tuple[Tensor, ...],
    requires_grad: Sequence[bool] | None = None,
) -> tuple[fx.Graph, fx.Graph]:
    """Traces `fn` and its gradient, and splits the joint graph so that the fewest bytes have to be saved (min-cut).

    Args:
        fn, example_inputs: see `generate_inference_graph`.
        requires_grad: for each example, True if its gradient is required. `None` if the gradients of all
            floating-point examples are required. Integer and bool inputs never have a gradient.

    Returns:
        `forward`: `[*examples, *captured] -> [*results, *intermediates]`, with the `meta` of
        `generate_inference_graph`.
        `backward`: `[*intermediates, *gradients of the differentiable results] -> [*gradients]`, with one gradient
        for each of `[*examples, *captured]`, or `None` if there is no gradient. The gradient of an argument that
        broadcasts has the shape of the results. The caller has to sum this gradient.

    Raises:
        RequiresGradError: `requires_grad` has the wrong length, or no result is differentiable.
        TraceError, UnsupportedCoreError: see `generate_inference_graph`.
    """
    if requires_grad is not None and len(requires_grad) != len(example_inputs):
        raise RequiresGradError(
            f"requires_grad has {len(requires_grad)} entries for {len(example_inputs)} example inputs."
        )
    with undisturbed():
        tracer = Tracer(unwrap_compiled(fn), example_inputs, as_tensors, requires_grad)
        if not any(tracer.differentiable):
            raise RequiresGradError(
                "no result of the function is differentiable: none is connected to an input or captured "
                "tensor that requires a gradient."
            )
        step_shape = _find_common_shape(tracer)
        _, forward_layouts = tracer.lower(tracer.record_forward(), step_shape)
        joint, gradients = tracer.record_vjp(tracer.differentiable, [True] * len(tracer.primals), with_results=True)
        _, layouts = tracer.lower(joint, step_shape, gradients, forward_layouts)
        halves = split_joint(joint, len(tracer.primals), len(tracer.results), tracer.mode)
        lowered = [lower(half, tracer.mode) for half in halves]
        saved = sum(n.op == "placeholder" for n in lowered[1].graph.nodes) - sum(tracer.differentiable)
        names = [f"saved_{i}" for i in range(saved)]
        names += [f"grad_result_{i}" for i, present in enumerate(tracer.differentiable) if present]
        forward = normalize(lowered[0], _name_primals(tracer))
        backward = normalize(lowered[1], names)
    return _annotate_captured(forward, tracer, layouts), _insert_absent(backward, gradients)


def _find_common_shape(tracer: Tracer) -> tuple[int, ...]:
    shapes = [t.shape for t in tracer.results]
    common = broadcast_shapes(shapes)
    if common is None:
        raise CoreReturnError(
            f"the function returned shapes {', '.join(str(list(s)) for s in shapes)}, which do not broadcast to one."
        )
    return common


def _annotate_captured(graph: fx.Graph, tracer: Tracer, layouts: dict[int, LiftedLayout]) -> fx.Graph:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"][len(tracer.examples) :]
    for i, (node, number) in enumerate(zip(placeholders, tracer.lifted, strict=True)):
        node.meta["captured"] = tracer.captures.tensors[number]
        node.meta["layout"] = layouts.get(i)
    return graph


def _name_primals(tracer: Tracer) -> list[str]:
    names = [f"input_{i}" for i in range(len(tracer.examples))]
    return names + [f"lifted_{i}" for i in range(len(tracer.lifted))]


def _insert_absent(graph: fx.Graph, positions: Sequence[int | None]) -> fx.Graph:
    """Adds a `None` to the results for each primal without a gradient."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    present: Any = output.args[0]
    output.args = (tuple(None if p is None else present[p] for p in positions),)
    return graph
