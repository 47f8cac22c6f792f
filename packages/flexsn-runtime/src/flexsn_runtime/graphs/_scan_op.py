"""An operator that runs a scan inside of compiled graphs, and chooses its launches when it runs.

The launches of steps with matrix products, and of parallel segments of time, depend on values that a compiler does not
have. The operator receives the scan's graphs as text. A compiled program thus contains the graphs, and another process
can run the program.

A compiled graph has one node for the operator, for any T. When the operator runs, no size is a symbol, so the operator
traces the step for the sizes of its arguments, as in eager mode. The backward of a step with products runs the forward
again, to compute the values that the gradient needs from each step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexsn_codegen import Numerics
from flexsn_graph import Port, RecurrentTrace, Role, StepValue, run_graph, trace_core
from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_hop.errors import LoweringError
from flexsn_hop.text import from_text, merged, read_graph, read_layout, to_text, write_graph, write_layout
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import as_outside, untraced
from flexsn_runtime.backend import TargetName, target_on
from flexsn_runtime.errors import UnsupportedScanError
from flexsn_runtime.graphs._differentiable import differentiable
from flexsn_runtime.graphs._graph_scan import arguments_of, scan_backward, scan_forward, unknown_states, values_of
from flexsn_runtime.graphs._graph_step import GraphSpecialization, GraphStep
from flexsn_runtime.graphs._symbols import Assignment, Size
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.operands._order import ScanFormat, strides_like
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.recurrent._staged_autograd import backward_staged, forward_staged, without_autocast


@dataclass(frozen=True, slots=True)
class ScanGraph:
    """A scan of a step that consists of graphs, or the gradient of such a scan.

    Attributes:
        core: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`.
        layout: layout of the scan, or of its gradient.
        on_cpu: the language of kernels on the CPU.
        vjp: `[*inputs, *states, *lifted, *cotangents] -> [*gradients]`; only for a gradient.
        has_products: True if the step has products with matrices. Its gradient then takes no saved states.
    """

    core: fx.GraphModule
    layout: ScanLayout | BackwardLayout
    on_cpu: TargetName
    vjp: fx.GraphModule | None = None
    has_products: bool = False

    @property
    def scan(self) -> ScanLayout:
        return self.layout.scan if isinstance(self.layout, BackwardLayout) else self.layout

    @property
    def num_primals(self) -> int:
        return self.scan.num_inputs + self.scan.num_states

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """Runs the operator, or records it in the graph that is being traced. Returns the results.

        Args:
            args: `[*input_seqs, *init_states, *lifted]`; elements of `lifted` may be sizes. For a gradient, `[*saved]`
                follows unless the step has products, and `[*gradients]` is at the end.
        """
        sizes = [i for i, value in enumerate(args) if not isinstance(value, Tensor)]
        tensors = [value for value in args if isinstance(value, Tensor)]
        results: list[Tensor] = run_scan(_write_text(self), tensors, [args[i] for i in sizes], sizes)
        return results

    def check(self, args: Sequence[Any]) -> None:
        """Traces the step and generates its kernels, so that errors are raised now and not when the operator runs.

        Args:
            args: the arguments of `__call__` without gradients and checkpoints. Sizes may be symbols.
        """
        assigned = Assignment([size for value in args for size in _list_sizes(value)], 0)
        num_inputs = self.scan.num_inputs
        likes = tuple(_Like.of(value, i < num_inputs, assigned) for i, value in enumerate(args))
        specialized = _specialize(_write_text(self), self, likes, args[0].device)
        specialized.step.check(training=self.vjp is not None)


class _Like(NamedTuple):
    """The layout of a tensor that is an argument of one step."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any, is_sequence: bool, number: Callable[[int], int]) -> _Like | int:
        """Returns the layout of a tensor argument, or the value of a size argument.

        Args:
            is_sequence: True if the first dimension of the argument is T.
            number: function that maps a size, which may be a symbol, to its value.
        """
        if not isinstance(value, Tensor):
            return number(value)
        shape = tuple(map(number, value.shape[is_sequence:]))
        stride = tuple(map(number, value.stride()[is_sequence:]))
        return cls(shape, stride, value.dtype, value.device)

    def primal(self) -> Tensor:
        """Returns a stand-in with the memory of one element.

        One element is enough for any size, since the tracer only uses shape, dtype and device.
        """
        tensor = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return tensor.requires_grad_(tensor.is_floating_point())

    def lifted(self) -> Tensor:
        """Returns a stand-in with the strides of the tensor, since a prologue may compute with the stand-in."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(tensor.is_floating_point())


def _list_sizes(value: Any) -> list[int]:
    return [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]


class _Specialized:
    """A step with products, specialized on arguments of one layout.

    Attributes:
        step: the step with its kernels.
        captured: positions, among the arguments, of the tensors that the step captures.
    """

    def __init__(self, graph: ScanGraph, likes: Sequence[_Like | int], device: torch.device) -> None:
        first_lifted = graph.num_primals
        with untraced():
            primals = [like.primal() for like in likes[:first_lifted] if isinstance(like, _Like)]
            lifted = [like.lifted() if isinstance(like, _Like) else like for like in likes[first_lifted:]]
            run: Callable[..., Any] = graph.core
            if graph.vjp is not None:
                layout = graph.layout
                assert isinstance(layout, BackwardLayout)
                flows = (*layout.output_grads, *layout.active_states)
                run = differentiable(run, graph.vjp, flows, layout.wanted)

            def core(*values: Tensor) -> tuple[Tensor, ...]:
                return tuple(run_graph(run, *values, *lifted))

            trace = trace_core(core, *graph.scan.counts, primals, follow=False, hoist=graph.vjp is None)
        if not isinstance(trace, RecurrentTrace):
            raise UnsupportedScanError("the step has no products with matrices for tensors of these sizes.")
        self.step = RecurrentSpecialization(trace, "scan", device, Numerics(), target_on(device, graph.on_cpu))
        positions = {id(value): first_lifted + i for i, value in enumerate(lifted)}
        self.captured = [positions[id(tensor)] for tensor in trace.captured]
        for value in lifted:
            if isinstance(value, Tensor):
                value.untyped_storage().resize_(0)  # no code reads its elements

    def arguments(self, graph: ScanGraph, args: Sequence[Any], lifted: Sequence[Tensor]) -> Arguments:
        inputs, states, _ = graph.scan.split(args)
        plain_states = [None if state is None else state.resolve_neg() for state in unknown_states(graph.scan, states)]
        return Arguments(tuple(x.resolve_neg() for x in inputs), tuple(plain_states), tuple(lifted))


# -- the operator's implementation ---------------------------------------------------------------------------------


def _run(
    program: str, tensors: Sequence[Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None
) -> list[Tensor]:
    graph = _read_program(program)
    args = merged(tensors, sizes, size_positions)
    with as_outside(), torch.no_grad(), without_autocast(args[0].device):
        return (_run_with_products if graph.has_products else _run_elementwise)(program, graph, args)


def _run_with_products(program: str, graph: ScanGraph, args: Sequence[Any]) -> list[Tensor]:
    layout, num_inputs = graph.layout, graph.scan.num_inputs
    count = len(layout.needs) if isinstance(layout, BackwardLayout) else len(args)
    likes = tuple(_Like.of(value, i < num_inputs, int) for i, value in enumerate(args[:count]))
    specialized = _specialize(program, graph, likes, args[0].device)
    if isinstance(layout, BackwardLayout):
        return _backward(graph, layout, specialized, args)
    return _forward(graph, layout, specialized, args)


def _specialize(program: str, graph: ScanGraph, likes: tuple[_Like | int, ...], device: torch.device) -> _Specialized:
    key = (program, device, likes)
    specialized = _specialized_steps.get(key)
    if specialized is None:
        specialized = _specialized_steps[key] = _Specialized(graph, likes, device)
    return specialized


_specialized_steps: Recent[_Specialized] = Recent()


def _run_elementwise(program: str, graph: ScanGraph, args: Sequence[Any]) -> list[Tensor]:
    """Runs the scan of an elementwise step, or its gradient, with the launches of eager mode."""
    layout, device = graph.layout, args[0].device
    args = [value.resolve_neg() if isinstance(value, Tensor) else value for value in args]
    count = len(layout.needs) if isinstance(layout, BackwardLayout) else len(args)
    values = values_of(graph.scan, args[:count])
    key = (program, device, tuple(values))
    step = _elementwise_steps.get(key)
    if step is None:
        step = _elementwise_steps[key] = _specialize_elementwise(graph, values, device)
    if isinstance(layout, BackwardLayout):
        end = count + layout.scan.num_states
        gradients = scan_backward(step, layout, args[:count], args[count:end], args[end:])
        trained_arguments = [value for value, is_needed in zip(args, layout.needs, strict=False) if is_needed]
        return [
            _convert_to_format(gradient, value) for gradient, value in zip(gradients, trained_arguments, strict=True)
        ]
    results = scan_forward(step, layout, args)
    first = layout.num_outputs + layout.num_states
    arguments = arguments_of(step, layout, args)
    strides = (math.prod(step.trace.step_shape), *step.format(arguments.inputs, arguments.states).step)
    return [*results[:first], *(_ensure_strides(checkpoint, strides) for checkpoint in results[first:])]


def _specialize_elementwise(
    graph: ScanGraph, values: Sequence[StepValue | Size], device: torch.device
) -> GraphSpecialization:
    layout = graph.layout
    if isinstance(layout, BackwardLayout):
        flows = (*layout.output_grads, *layout.active_states)
        graphs = GraphStep(graph.core, *layout.scan.counts, values, graph.vjp, flows, layout.wanted)
        return GraphSpecialization(graphs, device, layout.saved_interval, graph.on_cpu, recorded=False)
    graphs = GraphStep(graph.core, *layout.counts, values)
    return GraphSpecialization(graphs, device, layout.checkpoint_interval or None, graph.on_cpu, recorded=False)


_elementwise_steps: Recent[GraphSpecialization] = Recent()


def _forward(graph: ScanGraph, layout: ScanLayout, specialized: _Specialized, args: Sequence[Any]) -> list[Tensor]:
    step, interval = specialized.step, layout.checkpoint_interval
    arguments = specialized.arguments(graph, args, step.trace.lift([args[i] for i in specialized.captured]))
    rows = (arguments.num_steps - 1) // interval if interval else 0
    saved_ports = frozenset(Port(Role.STATE, i) for i in range(layout.num_states)) if rows else frozenset()
    returned, memory = forward_staged(step, arguments, state_seqs=not layout.final_state, kept_ports=saved_ports)
    results = list(returned)
    if interval:
        for i, value in enumerate(step.trace.states):
            form = step.format(arguments.inputs, arguments.states, value.shape)
            shape = (rows + layout.spare_checkpoints, *value.shape)
            unit = max(1, functools.reduce(lambda n, size: n * size, value.shape, 1))
            checkpoints = torch.empty_strided(shape, (unit, *form.step), dtype=value.dtype, device=arguments.device)
            if rows:
                checkpoints[:rows].copy_(memory[Port(Role.STATE, i)][interval::interval][:rows])
            checkpoints[rows:].zero_()  # so that every run returns equal results
            results.append(checkpoints)
    return results


def _backward(graph: ScanGraph, layout: BackwardLayout, specialized: _Specialized, args: Sequence[Any]) -> list[Tensor]:
    step, needs, state_seqs = specialized.step, layout.needs, not layout.scan.final_state
    with torch.enable_grad():
        leaves = [args[i].detach().requires_grad_(needs[i]) for i in specialized.captured]
        lifted_tensors = step.trace.lift(leaves)
    arguments = specialized.arguments(graph, args, [tensor.detach() for tensor in lifted_tensors])
    received = iter(args[len(needs) :])
    present = (*layout.output_grads, *layout.state_grads)
    gradients = [next(received) if is_present else None for is_present in present]
    needs_grad = (*needs[: graph.num_primals], *(tensor.requires_grad for tensor in lifted_tensors))
    saved_ports = frozenset(step.kept(step.carrying(needs_grad)))
    _, memory = forward_staged(step, arguments, state_seqs=state_seqs, kept_ports=saved_ports, needs_grad=needs_grad)
    results = backward_staged(step, arguments, memory, saved_ports, gradients, needs_grad, state_seqs=state_seqs)
    by_position: dict[int, Tensor | None] = dict(enumerate(results[: graph.num_primals]))
    pairs = [(t, g) for t, g in zip(lifted_tensors, results[graph.num_primals :], strict=True) if g is not None]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if pairs and trained:
        of_captured = torch.autograd.grad([t for t, _ in pairs], trained, [g for _, g in pairs], allow_unused=True)
        positions = [i for i, leaf in zip(specialized.captured, leaves, strict=True) if leaf.requires_grad]
        by_position.update(zip(positions, of_captured, strict=True))
    # The gradients of tensors that the step does not read are zeros.
    return [_convert_to_format(by_position.get(i), args[i]) for i, is_needed in enumerate(needs) if is_needed]


def _convert_to_format(gradient: Tensor | None, argument: Tensor) -> Tensor:
    """Returns a gradient in the memory format of its argument. If the gradient is `None`, returns zeros."""
    strides = strides_like(argument)
    if gradient is None:
        return torch.zeros_like(argument.new_empty_strided(argument.shape, strides))
    return _ensure_strides(gradient, strides)


def _ensure_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns a tensor with these strides that is not a view. Copies `tensor` if necessary."""
    if tensor.stride() == tuple(strides) and tensor._base is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _create_fake_results(
    program: str, tensors: Sequence[Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None
) -> list[Tensor]:
    """Returns tensors with the shapes, strides and dtypes of the results. Sizes may be symbols."""
    graph = _read_program.__wrapped__(program)  # bypasses the cache, since the constants of this graph are fake tensors
    args = merged(tensors, sizes, size_positions)
    layout = graph.layout
    if isinstance(layout, BackwardLayout):
        arguments = (args[i] for i, is_needed in enumerate(layout.needs) if is_needed)
        return [t.new_empty_strided(t.shape, strides_like(t, guarded=True)) for t in arguments]
    inputs, states, lifted = layout.split(args)
    values = tuple(graph.core(*(x.select(0, 0) for x in inputs), *states, *lifted))
    num_steps = inputs[0].shape[0]
    known_states = unknown_states(layout, states)
    forms = [ScanFormat.of(value.shape, inputs, known_states, guarded=True) for value in values]

    def allocate(like: Tensor, size: Sequence[int], strides: Sequence[int]) -> Tensor:
        tensor: Tensor = inputs[0].new_empty_strided(tuple(size), tuple(strides), dtype=like.dtype)
        return tensor

    results = []
    for i, (value, form) in enumerate(zip(values, forms, strict=True)):
        one_step = layout.final_state and i >= layout.num_outputs
        sequence = (num_steps, *value.shape)
        results.append(
            allocate(value, value.shape, form.step) if one_step else allocate(value, sequence, form.sequence)
        )
    if layout.checkpoint_interval:
        rows = (num_steps - 1) // layout.checkpoint_interval + layout.spare_checkpoints
        for value, form in zip(values[layout.num_outputs :], forms[layout.num_outputs :], strict=True):
            unit = functools.reduce(lambda n, size: n * size, value.shape, 1)
            results.append(allocate(value, (rows, *value.shape), (unit, *form.step)))
    return results


# Kernels can read any strides, so a compiler does not have to copy arguments to a certain layout.
torch.library.define(
    "flexsn_runtime::run_scan",
    "(str program, Tensor[] tensors, SymInt[] sizes, int[] size_positions) -> Tensor[]",
    tags=(torch.Tag.flexible_layout,),
)
torch.library.impl("flexsn_runtime::run_scan", "CompositeExplicitAutograd", _run)
torch.library.register_fake("flexsn_runtime::run_scan", _create_fake_results)

run_scan = torch.ops.flexsn_runtime.run_scan.default


# -- the text form of graphs ---------------------------------------------------------------------------------------


def _write_text(graph: ScanGraph) -> str:
    graphs = [graph.core] if graph.vjp is None else [graph.core, graph.vjp]
    try:
        return to_text([list(map(write_graph, graphs)), write_layout(graph.layout), graph.on_cpu, graph.has_products])
    except LoweringError as error:
        raise UnsupportedScanError(f"{error}.") from error


@functools.lru_cache(maxsize=256)
def _read_program(program: str) -> ScanGraph:
    graphs, layout, on_cpu, has_products = from_text(program)
    core, *vjps = map(read_graph, graphs)
    return ScanGraph(core, read_layout(layout), on_cpu, vjps[0] if vjps else None, has_products)
