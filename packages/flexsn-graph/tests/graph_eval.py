"""Evaluates normalised graphs on real tensors. As in a kernel, every value has the shape of the step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph import LiftedLayout, StepTrace


def read_lifted(tensor: Tensor, layout: LiftedLayout | None, step_shape: Sequence[int]) -> Tensor:
    """Returns the value of a lifted tensor that each element of the step reads."""
    if layout is None:
        return torch.full(tuple(step_shape), 0, dtype=tensor.dtype)  # the graph does not read this tensor
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return flat.as_strided(tuple(step_shape), layout.strides, layout.offset)


def sum_lifted(gradient: Tensor, tensor: Tensor, layout: LiftedLayout) -> Tensor:
    """Sums the gradients of the step's elements to the gradient of a lifted tensor."""
    positions = torch.arange(tensor.numel()).as_strided(gradient.shape, layout.strides, layout.offset)
    summed = torch.zeros(tensor.numel(), dtype=gradient.dtype)
    summed.index_add_(0, positions.flatten(), gradient.flatten())
    return summed.view(tensor.shape)


def evaluate(graph: fx.Graph, arguments: Sequence[Tensor], step_shape: Sequence[int]) -> list[Any]:
    """Runs `graph` on `arguments`, which broadcast to the step. Entries of the result may be `None`."""
    shape = tuple(step_shape)
    values: dict[fx.Node, Any] = {}
    inputs = iter(arguments)
    results: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = next(inputs)
            assert value.dtype == node.meta["val"].dtype
            values[node] = value.detach().expand(shape)
        elif node.op == "call_function":
            values[node] = _call(node, values, shape)
        else:
            assert node.op == "output"
            results = [None if entry is None else values[entry] for entry in node.args[0]]
    assert next(inputs, None) is None
    return results


def _call(node: fx.Node, values: Mapping[fx.Node, Any], shape: tuple[int, ...]) -> Any:
    target: Any = node.target
    if target is operator.getitem:
        return values[node.all_input_nodes[0]][node.args[1]]
    expected = node.meta["val"]
    if target is torch.ops.prims.scalar_tensor.default:
        return torch.full(shape, node.args[0], dtype=expected.dtype)  # type: ignore[arg-type]
    # Constants have the dtype of the tensors in their op. If the only tensor is a condition, they have the dtype of the
    # result.
    tensors = [values[n] for n in node.all_input_nodes]
    dtype = expected.dtype if target is torch.ops.prims.where.default else tensors[0].dtype

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, bool | int | float):
            return torch.full(shape, value, dtype=dtype)
        return value

    result = target(*map(argument, node.args), **node.kwargs)
    if target is torch.ops.prims.signbit.default:
        result = result.to(expected.dtype)  # torch returns bool, but its fake result has the argument's dtype
    if isinstance(result, Tensor):
        assert result.dtype == expected.dtype, node.format_node()
        assert result.shape == shape, node.format_node()
    return result


def run_forward(trace: StepTrace, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Computes `[*inputs, *states] -> [*outputs, *new_states]` through the normalised graph."""
    lifted = _read_all(trace, trace.forward.layouts)
    return evaluate(trace.forward.graph, [*arguments, *lifted], trace.step_shape)


def run_vjp(
    trace: StepTrace,
    arguments: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    required: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Returns the gradients of `[*inputs, *states, *captured]`, summed to their shapes."""
    lifted = trace.lift(trace.captured)
    required = [True] * (len(arguments) + len(lifted)) if required is None else required
    vjp = trace.vjp([c is not None for c in cotangents], required)
    vjp_arguments = [*arguments, *_read_all(trace, vjp.layouts), *(c for c in cotangents if c is not None)]
    actual = evaluate(vjp.graph, vjp_arguments, trace.step_shape)
    gradients: list[Tensor | None] = []
    for i, (primal, position) in enumerate(zip([*arguments, *lifted], vjp.gradients, strict=True)):
        if position is None:
            gradients.append(None)
        elif i < len(arguments):
            gradients.append(actual[position].sum_to_size(primal.shape))
        else:
            layout = vjp.layouts[i - len(arguments)]
            gradients.append(sum_lifted(actual[position], primal, layout))
    first = len(arguments)
    return gradients[:first] + _through_prologue(trace.captured, lifted, gradients[first:])


def _through_prologue(
    captured: Sequence[Tensor], lifted: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Computes the gradients of captured tensors from the gradients of the lifted tensors that depend on them."""
    pairs = [(t, g) for t, g in zip(lifted, gradients, strict=True) if g is not None]
    differentiated = [t for t in captured if t.requires_grad]
    if not pairs or not differentiated:
        return [None] * len(captured)
    cotangents = [g.to(t.dtype) for t, g in pairs]
    actual = iter(torch.autograd.grad([t for t, _ in pairs], differentiated, cotangents, allow_unused=True))
    return [next(actual) if t.requires_grad else None for t in captured]


def _read_all(trace: StepTrace, layouts: Mapping[int, LiftedLayout]) -> list[Tensor]:
    lifted = trace.lift(trace.captured)
    return [read_lifted(t, layouts.get(i), trace.step_shape) for i, t in enumerate(lifted)]


def eager_vjp(
    core: Callable[..., Any],
    arguments: Sequence[Tensor],
    captured: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Returns the gradients of `torch.autograd` as the reference."""
    leaves = [a.detach().clone() for a in arguments]
    leaves = [a.requires_grad_(a.is_floating_point()) for a in leaves]
    results = core(*leaves)
    results = results if isinstance(results, tuple | list) else (results,)
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    primals = [*leaves, *captured]
    differentiated = [p for p in primals if p.requires_grad]
    if not pairs or not differentiated:
        return [None] * len(primals)
    actual = iter(torch.autograd.grad([r for r, _ in pairs], differentiated, [c for _, c in pairs], allow_unused=True))
    return [next(actual) if p.requires_grad else None for p in primals]


def assert_same(actual: Tensor, expected: Tensor, rtol: float = 0.0) -> None:
    """Compares tensors bitwise, or up to `rtol`, including the signs of zeros. All NaNs are equal."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True)
    numbers = ~actual.isnan()
    assert torch.equal(actual[numbers].signbit(), expected[numbers].signbit()), "the sign of a zero differs"


def assert_forward_equal(
    trace: StepTrace, core: Callable[..., Any], arguments: Sequence[Tensor], rtol: float = 0.0
) -> None:
    """Checks that the graph's results equal those of the core."""
    with torch.no_grad():
        expected = core(*[a.clone() for a in arguments])
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    actual = run_forward(trace, arguments)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours, theirs.detach(), rtol)


def assert_vjp_equal(
    trace: StepTrace,
    core: Callable[..., Any],
    arguments: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    tolerance: float = 1e-12,
) -> None:
    """Checks that the VJP graph's gradients equal autograd's, where an absent gradient equals zeros."""
    reference = eager_vjp(core, arguments, trace.captured, cotangents)
    for ours, theirs in zip(run_vjp(trace, arguments, cotangents), reference, strict=True):
        if ours is None:
            assert theirs is None or not theirs.any(), "a gradient is missing"
        else:
            assert theirs is not None, "a gradient that autograd does not have"
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check_step(
    core: Callable[..., Any],
    arguments: Sequence[Tensor],
    counts: tuple[int, int, int],
    *,
    rtol: float = 0.0,
) -> StepTrace:
    """Traces `core`, compares forward and VJP with eager mode, and returns the trace.

    Args:
        arguments: real `[*inputs, *states]`. Use float64, because of the tolerance of the gradients.
        counts: `num_inputs, num_states, num_outputs`.
        rtol: relative tolerance of the forward. Eager mode applies a function to a small parameter, but the graph
            applies it to each element of the step. Torch's vectorised functions and their remainder loops differ in
            the last bit.
    """
    from flexsn_graph import trace_step

    trace = trace_step(core, *counts, arguments)
    assert_forward_equal(trace, core, arguments, rtol)
    generator = torch.Generator().manual_seed(0)
    results = run_forward(trace, arguments)
    cotangents = [
        torch.randn(r.shape, dtype=r.dtype, generator=generator) if r.is_floating_point() else None for r in results
    ]
    assert_vjp_equal(trace, core, arguments, cotangents)
    return trace
