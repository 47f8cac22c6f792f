"""Kernels of a step that is a graph from a compiler, in which sizes may be symbols."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from flexsn_codegen import CoreSource
from flexsn_graph import LiftedLayout, StepGraph, StepTrace, StepValue, run_graph, trace_step
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import size_hint, untraced
from flexsn_runtime.backend import TargetName, target_on
from flexsn_runtime.errors import SymbolicSizeError
from flexsn_runtime.graphs._differentiable import differentiable
from flexsn_runtime.graphs._symbols import Assignment, Size, symbolic_layout
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.operands._layout import broadcast_shape
from flexsn_runtime.plans._buckets import LaunchPlan, with_segment, writable
from flexsn_runtime.step._pointwise_step import Specialization

_Graph = TypeVar("_Graph", StepTrace, StepGraph)

# Number of elements that a launch plan assumes if a symbolic size has no hint. A plan for large steps is also suitable
# for small steps, but not vice versa.
_UNKNOWN_NCL = 2**20


class StepFunction(Protocol):
    """A graph that can be called as a function."""

    @property
    def code(self) -> Any:
        """The code of the graph, which is equal for graphs with equal operators."""

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of the operators."""

    def __call__(self, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step that consists of ATen graphs.

    Attributes:
        core: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        arguments: description of each argument of one step. Inputs and states are tensors; lifted arguments may also be
            sizes.
        vjp: `[*inputs, *states, *lifted, *cotangents] -> [*gradients]`; `None` if no gradient is needed.
        cotangents: for each of `[*outputs, *new_states]`, True if `vjp` takes its gradient.
        needs_grad: for each argument, True if `vjp` returns its gradient.
        on_pieces: see `trace_step`.
    """

    core: StepFunction
    num_inputs: int
    num_states: int
    num_outputs: int
    arguments: Sequence[StepValue | Size]
    vjp: StepFunction | None = None
    cotangents: tuple[bool, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    on_pieces: bool = False

    @property
    def num_primals(self) -> int:
        return self.num_inputs + self.num_states

    def sizes_of(self, position: int) -> tuple[Size, ...]:
        """Returns the sizes in an argument: the shape of a tensor, or a size argument itself."""
        value = self.arguments[position]
        return value.shape if isinstance(value, StepValue) else (value,)

    @property
    def sizes(self) -> list[Size]:
        """All sizes in the arguments."""
        return [size for position in range(len(self.arguments)) for size in self.sizes_of(position)]

    @property
    def key(self) -> Hashable:
        """A value that is equal for steps with equal kernels; `None` if the step cannot be compared.

        The value is `None` if a size is a symbol, because symbols belong to one compilation. It is also `None` if a
        graph has constant tensors, because the code of the graph only contains the names of these tensors.
        """
        graphs = [graph for graph in (self.core, self.vjp) if graph is not None]
        symbolic = any(type(size) is not int for size in self.sizes)
        if symbolic or any(graph.graph.find_nodes(op="get_attr") for graph in graphs):
            return None
        codes = tuple(graph.code for graph in graphs)
        counts = (self.num_inputs, self.num_states, self.num_outputs)
        return codes, counts, tuple(self.arguments), self.cotangents, self.needs_grad, self.on_pieces


class GraphSpecialization(Specialization):
    """Kernels of a `GraphStep`.

    Args:
        segment: distance between checkpoints; `None` for the distance of the launch plan.
        on_cpu: the language of kernels on the CPU.
        recorded: True if launches are recorded in the graph that is being traced. If False, launches run, and no size
            may be a symbol.

    Attributes:
        is_recorded: the argument `recorded`.
        lifted: for each tensor that the step captures, its position among the step's arguments.
        distance: distance between the checkpoints that the kernels write and read. It is a divisor of `segment`, and
            smaller than `segment` if a kernel cannot contain the code of `segment` steps.
    """

    def __init__(
        self,
        step: GraphStep,
        device: torch.device,
        segment: int | None,
        on_cpu: TargetName = "cpp",
        *,
        recorded: bool = True,
    ) -> None:
        self.is_recorded = recorded
        self._assignments = [Assignment(step.sizes, 0)]
        if self._assignments[0].is_symbolic:
            self._assignments.append(Assignment(step.sizes, 1))
        with untraced():
            traced = [_trace(step, assigned, device) for assigned in self._assignments]
            self._traces = [trace for trace, _ in traced]
            super().__init__(self._traces[0], "scan", device, target=target_on(device, on_cpu))
            _check_same(self._emit, self._traces)
        self.distance = None if segment is None else writable(segment, self.cost.backward_ops)
        _, stand_ins = traced[0]
        self.lifted = [stand_ins[id(tensor)] for tensor in self.trace.lifted]
        for trace in self._traces:
            for tensor in trace.lifted:
                # No code reads the tensor, and the memory of a CUDA graph that is being recorded should not contain it.
                tensor.untyped_storage().resize_(0)
        self._lifted_shapes = [step.sizes_of(position) for position in self.lifted]
        # `trace` describes one assignment. Code that uses the trace needs the symbols instead of the assigned numbers.
        sized = copy.copy(self.trace)
        sized.step_shape = self._find_step_shape(step)
        sized.forward = replace(sized.forward, layouts=self._compute_layouts([trace.forward for trace in self._traces]))
        self.trace = sized

    @classmethod
    def of(
        cls, step: GraphStep, device: torch.device, segment: int | None, on_cpu: TargetName = "cpp"
    ) -> GraphSpecialization:
        """Returns a specialization, which steps with equal keys share. The arguments are those of the class."""
        step_key = step.key
        if step_key is None:
            return cls(step, device, segment, on_cpu)
        key = (step_key, device, segment, on_cpu)
        specialization = _specializations.get(key)
        if specialization is None:
            specialization = _specializations[key] = cls(step, device, segment, on_cpu)
        else:
            specialization.forget_plans()  # the plans on disk may have changed
        return specialization

    def plan(self, ncl: int) -> LaunchPlan:
        hint = size_hint(ncl)
        plan = super().plan(_UNKNOWN_NCL if hint is None else hint)
        return plan if self.distance is None else with_segment(plan, self.distance)

    def segment(self, plan: LaunchPlan, num_steps: int) -> int:
        # The distance determines the memory of the graph's checkpoints, so it also applies to short sequences.
        return super().segment(plan, num_steps) if self.distance is None else self.distance

    def has_rest(self, num_steps: int, chunk: int) -> bool:
        # If T is not a symbol, the graph only runs for this T. If T is a multiple of the chunk, no steps remain after
        # the last chunk.
        return not self.is_recorded or not isinstance(num_steps, int) or num_steps % chunk > 0

    def _trace_vjp(self, cotangents: tuple[bool, ...], needs_grad: tuple[bool, ...]) -> StepGraph:
        with untraced():
            vjps = [trace.vjp(cotangents, needs_grad) for trace in self._traces]
            _check_same(self._emit_vjp, vjps)
        return replace(vjps[0], layouts=self._compute_layouts(vjps))

    @property
    def _launch(self) -> Callable[..., Launch]:
        """The function that creates launches. If `is_recorded` is True, calls of these launches are recorded."""
        return self.backend.recorded if self.is_recorded else self.backend.launch

    def _compute_layouts(self, graphs: Sequence[StepGraph]) -> dict[int, LiftedLayout]:
        return {
            i: symbolic_layout(self._assignments, [graph.layouts[i] for graph in graphs], self._lifted_shapes[i])
            for i in graphs[0].layouts
        }

    def _find_step_shape(self, step: GraphStep) -> tuple[int, ...]:
        """Returns the shape of the step, to which its inputs and states broadcast."""
        shape = broadcast_shape([step.sizes_of(position) for position in range(step.num_primals)])
        if self._assignments[0].shape(shape) != self.trace.step_shape:
            raise SymbolicSizeError(
                f"the shape {list(self.trace.step_shape)} of the outputs depends only on a captured tensor. Expand an "
                "input to this shape."
            )
        return shape


_specializations: Recent[GraphSpecialization] = Recent()


def _trace(step: GraphStep, assigned: Assignment, device: torch.device) -> tuple[StepTrace, dict[int, int]]:
    """Traces the step for the assigned sizes.

    Returns:
        The trace, and a dictionary from the `id` of each lifted tensor's stand-in to the tensor's position among the
        arguments.
    """

    def stand_in(value: StepValue | Size) -> Any:
        if not isinstance(value, StepValue):
            return assigned(value)
        # One element is enough for any size, since the tracer uses only shape, dtype and device.
        tensor = torch.empty((), dtype=value.dtype, device=device).expand(assigned.shape(value.shape))
        return tensor.requires_grad_(tensor.is_floating_point())

    primals = [stand_in(value) for value in step.arguments[: step.num_primals]]
    lifted = [stand_in(value) for value in step.arguments[step.num_primals :]]
    run: Any = step.core
    if step.vjp is not None:
        run = differentiable(run, step.vjp, step.cotangents, step.needs_grad)

    def core(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_graph(run, *values, *lifted))

    counts = (step.num_inputs, step.num_states, step.num_outputs)
    # With `on_pieces`, captured tensors are pieces that the step joins, so nothing is hoisted.
    trace = trace_step(core, *counts, primals, follow=False, on_pieces=step.on_pieces, hoist=not step.on_pieces)
    return trace, {id(value): step.num_primals + i for i, value in enumerate(lifted)}


def _check_same(emit: Callable[[_Graph], CoreSource | None], graphs: Sequence[_Graph]) -> None:
    """Raises an error unless all graphs have the same source. There is one graph for each assignment."""
    if len(graphs) == 1:
        return
    sources = [emit(graph) for graph in graphs]
    if len({source and source.name for source in sources}) > 1:
        raise SymbolicSizeError(
            "the core computes with a symbolic size, which would be a constant in a kernel. Convert the size to a "
            "tensor outside of the core, or compile with dynamic=False."
        )
