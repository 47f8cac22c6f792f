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

# Size to plan for if a symbolic size has no hint. A plan for large steps also suits small ones, but not vice versa.
_UNKNOWN_NCL = 2**20


class StepFunction(Protocol):
    """A graph that can be called as a function."""

    @property
    def code(self) -> Any:
        """A value that is equal for graphs with equal operators."""

    @property
    def graph(self) -> fx.Graph:
        """The operators."""

    def __call__(self, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step as ATen graphs.

    Attributes:
        core: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        arguments: descriptions of one step's arguments, which are tensors. Lifted arguments may also be sizes.
        vjp: `[*inputs, *states, *lifted, *cotangents] -> [*gradients]`; `None` if no gradient will be needed.
        cotangents: for each of `[*outputs, *new_states]`, True if `vjp` takes its gradient.
        needs_grad: for each argument, True if `vjp` returns its gradient.
        on_pieces: same as for `trace_step`.
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
        """The sizes in an argument: the shape of a tensor, or the size itself."""
        value = self.arguments[position]
        return value.shape if isinstance(value, StepValue) else (value,)

    @property
    def sizes(self) -> list[Size]:
        """All sizes in the arguments."""
        return [size for position in range(len(self.arguments)) for size in self.sizes_of(position)]

    @property
    def key(self) -> Hashable:
        """A value that is equal for steps with equal kernels; `None` if this cannot be decided.

        The value is `None` if a size is a symbol, because symbols belong to one compilation. It is also `None` if the
        graph has constant tensors, because the graph's code contains only their names.
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
        segment: distance of the checkpoints; `None` for the distance of the launch plan.
        on_cpu: the language of kernels on the CPU.
        recorded: True if a tracer records the launches; False if they run, which requires that all sizes are numbers.

    Attributes:
        is_recorded: the argument `recorded`.
        lifted: for each tensor that the step captures, its position among the step's arguments.
        distance: distance of the checkpoints that the kernels write and read. It divides `segment`, and is smaller if a
            kernel cannot contain the code of `segment` steps.
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
                # No code reads the tensor, and a CUDA graph that is being recorded has no memory to spare for it.
                tensor.untyped_storage().resize_(0)
        self._lifted_shapes = [step.sizes_of(position) for position in self.lifted]
        # The trace has the numbers of one assignment, but its users need the symbols.
        sized = copy.copy(self.trace)
        sized.step_shape = self._step_shape(step)
        sized.forward = replace(sized.forward, layouts=self._layouts([trace.forward for trace in self._traces]))
        self.trace = sized

    @classmethod
    def of(
        cls, step: GraphStep, device: torch.device, segment: int | None, on_cpu: TargetName = "cpp"
    ) -> GraphSpecialization:
        """Returns one specialization for all equal layers of a network. Takes the arguments of the class."""
        step_key = step.key
        if step_key is None:
            return cls(step, device, segment, on_cpu)
        key = (step_key, device, segment, on_cpu)
        found = _made.get(key)
        if found is None:
            found = _made[key] = cls(step, device, segment, on_cpu)
        else:
            found.forget_plans()  # the plans on disk may have changed
        return found

    def plan(self, ncl: int) -> LaunchPlan:
        hint = size_hint(ncl)
        plan = super().plan(_UNKNOWN_NCL if hint is None else hint)
        return plan if self.distance is None else with_segment(plan, self.distance)

    def segment(self, plan: LaunchPlan, num_steps: int) -> int:
        # The distance determines the memory of the graph's checkpoints, so it also applies to short sequences.
        return super().segment(plan, num_steps) if self.distance is None else self.distance

    def has_rest(self, num_steps: int, chunk: int) -> bool:
        # If T is a number, the graph runs for this T only. If whole chunks cover T, a kernel needs no code for
        # remaining steps.
        return not self.is_recorded or not isinstance(num_steps, int) or num_steps % chunk > 0

    def _trace_vjp(self, cotangents: tuple[bool, ...], needs_grad: tuple[bool, ...]) -> StepGraph:
        with untraced():
            vjps = [trace.vjp(cotangents, needs_grad) for trace in self._traces]
            _check_same(self._emit_vjp, vjps)
        return replace(vjps[0], layouts=self._layouts(vjps))

    @property
    def _launch(self) -> Callable[..., Launch]:
        """The function that creates launches. If `is_recorded` is True, these launches record themselves."""
        return self.backend.recorded if self.is_recorded else self.backend.launch

    def _layouts(self, graphs: Sequence[StepGraph]) -> dict[int, LiftedLayout]:
        return {
            i: symbolic_layout(self._assignments, [graph.layouts[i] for graph in graphs], self._lifted_shapes[i])
            for i in graphs[0].layouts
        }

    def _step_shape(self, step: GraphStep) -> tuple[int, ...]:
        """The step's shape: the common shape of the tensors that are not lifted."""
        shape = broadcast_shape([step.sizes_of(position) for position in range(step.num_primals)])
        if self._assignments[0].shape(shape) != self.trace.step_shape:
            raise SymbolicSizeError(
                f"the shape {list(self.trace.step_shape)} of the outputs depends only on a captured tensor. Expand an "
                "input to this shape."
            )
        return shape


_made: Recent[GraphSpecialization] = Recent()


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
    # The captured tensors are pieces, and the step joins them.
    trace = trace_step(core, *counts, primals, follow=False, on_pieces=step.on_pieces, hoist=not step.on_pieces)
    return trace, {id(value): step.num_primals + i for i, value in enumerate(lifted)}


def _check_same(emit: Callable[[_Graph], CoreSource | None], graphs: Sequence[_Graph]) -> None:
    """Raises an error unless the graphs, one for each assignment, have the same source."""
    if len(graphs) == 1:
        return
    sources = [emit(graph) for graph in graphs]
    if len({source and source.name for source in sources}) > 1:
        raise SymbolicSizeError(
            "the core computes with a symbolic size, which would be a constant in a kernel. Convert the size to a "
            "tensor outside of the core, or compile with dynamic=False."
        )
