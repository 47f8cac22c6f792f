"""A traced pointwise step and its kernels: one kernel for all steps of the forward, and one for the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from flexsn_codegen import BackwardSpec, CoreSource, ForwardSpec, Late, Numerics, backward_source, forward_source
from flexsn_codegen.scan.segments import Columns
from flexsn_graph import (
    CoreTrace,
    Port,
    Presence,
    Residuals,
    Role,
    StepGraph,
    StepTrace,
    ends_early,
    linear_part,
    ports,
    without_cotangents,
)
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import as_outside
from flexsn_runtime.backend import TargetName
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans import _tuned as tuned
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, StepCost, checkpoint_distance, one_chunk, scattered
from flexsn_runtime.step._bits import check_bits
from flexsn_runtime.step._residuals import Policy, choose_residuals
from flexsn_runtime.step._specialization import CoreSpecialization

_EXACT = Numerics()


class Specialization(CoreSpecialization):
    """A traced pointwise step, and the kernels that exist for it.

    Args:
        kernels: compiled kernels, which all specializations of a program share. New kernels are added to this
            dictionary.
        takes_numbers: True if the numbers that the step computes with are arguments of the kernels, False if they are
            constants in the source of the kernels.
        bits: for each output, True if the forward also writes this output as bits. An empty sequence means that no
            output has bits.
        zero_one: for each output, True if the output must be 0 or 1. An empty sequence means that no output is checked.
        counts: indices of the inputs that count down.
        late: delays of inputs, by the input's index.

    Attributes:
        is_recorded: True if a tracer records the launches.

    Raises:
        SpikeBitsError: an output in `bits` or `zero_one` is not known to be 0 or 1.
    """

    trace: StepTrace
    is_recorded: bool = False

    def __init__(
        self,
        trace: StepTrace,
        name: str,
        device: torch.device,
        numerics: Numerics = _EXACT,
        policy: Policy = "recompute",
        target: TargetName = "triton",
        kernels: Recent[CompiledKernel] | None = None,
        *,
        takes_numbers: bool = False,
        bits: tuple[bool, ...] = (),
        zero_one: tuple[bool, ...] = (),
        counts: tuple[int, ...] = (),
        late: Mapping[int, Late] = MappingProxyType({}),
    ) -> None:
        super().__init__(trace, name, device, numerics, target, kernels)
        self._takes_numbers = takes_numbers
        check_bits(trace, bits)
        check_bits(trace, zero_one)
        self.bits = bits
        self.counts = counts
        self.late = late
        self.follows = _find_followers(trace.forward, late)
        self.ends = ends_early(trace.forward, counts)
        once = {*counts, *(delays.by for delays in late.values())}
        loaded_inputs = [value for i, value in enumerate(trace.inputs) if i not in once]  # loaded in each step
        self.cost = StepCost.of(trace.forward.graph, loaded_inputs or trace.inputs, trace.outputs)
        if late:  # values that depend only on delays are computed before the steps
            self.cost = replace(self.cost, num_ops=self.cost.num_ops - _count_ops_on_lifted(trace.forward))
        self._policy = policy
        self._residuals: dict[tuple[bool, ...], Residuals | None] = {}
        self._cores: dict[Residuals | None, CoreSource] = {}
        self._vjps: dict[Hashable, tuple[StepGraph, CoreSource | None]] = {}
        self._plans: dict[int, LaunchPlan] = {}  # by size class
        # Plans by kind of scan and layout; see `kernels/_scan.py`.
        self.plans: Recent[Any] = Recent()
        self.speculations: Recent[Any] = Recent()  # `Speculation`s, by their rules
        self.combined: Recent[int] = Recent()  # maps numbers of steps to segments of backward scans
        # Maps the number of steps to the number of segments in forward scans of an affine step.
        self.affine_segments: Recent[int] = Recent()
        self._linear: tuple[StepGraph, CoreSource | None] | Literal[False] | None = False  # False: not yet derived
        self.has_backward = False  # True if a backward was prepared

    def _begin(self, trace: CoreTrace) -> None:
        if trace.step_shape != self.trace.step_shape:
            self._residuals = {}  # the choice depends on the size of a step
            self._vjps = {key: vjp for key, vjp in self._vjps.items() if vjp[0].is_of_any_batch}
        super()._begin(trace)
        self.plans, self.has_backward = Recent(), False
        self._plans = {}  # the plans on disk may have changed
        self.speculations, self.combined, self.affine_segments = Recent(), Recent(), Recent()  # these depend on numbers
        self._linear = False
        self._kernel_names = {}  # filled again when scans are prepared

    def _forget_sources(self) -> None:
        self._cores, self._vjps, self._residuals, self._plans = {}, {}, {}, {}
        self.speculations, self.combined, self.affine_segments = Recent(), Recent(), Recent()
        self._linear = False
        self.plans, self.has_backward = Recent(), False

    def check(self, *, training: bool) -> None:
        """Raises each error about the step that kernel generation would raise, without compiling kernels."""
        self.core()
        if training:
            trace = self.trace
            values = (*trace.inputs, *trace.states, *trace.lifted_values)
            self.vjp(trace.differentiable, tuple(value.dtype.is_floating_point for value in values))

    def plan(self, ncl: int) -> LaunchPlan:
        """Returns the launch plan for a step of `ncl` elements."""
        limit = self.backend.size_class(ncl)
        plan = self._plans.get(limit)
        if plan is None:
            state_bytes = sum(dtype.itemsize for dtype in self.state_dtypes)
            default = self.backend.plan(limit, self.cost, state_bytes)
            if self.late and not self.backend.interpreted:
                default = scattered(limit, default)
            plan = self._plans[limit] = tuned.load(self.plan_key(limit), default) or default
        return plan

    def chunks(self, config: LaunchConfig, num_steps: int, ops_per_step: int) -> tuple[LaunchConfig, bool, bool]:
        """Returns the settings with which a kernel processes `num_steps` steps.

        Args:
            config: configuration of the plan.
            ops_per_step: number of operations per step of the kernel.

        Returns:
            The configuration; True if the kernel has code for the steps that remain after whole chunks; and True if all
            steps are one chunk.
        """
        if self.late:  # chunks in flight would take shared memory from the cache of scattered loads
            return replace(config, stages=1), True, False
        short = one_chunk(config, num_steps, ops_per_step)
        return (config, self.has_rest(num_steps, config.chunk), False) if short is None else (short, False, True)

    def segment(self, plan: LaunchPlan, num_steps: int) -> int:
        """Returns the number of steps between two checkpoints."""
        if self.late:
            return plan.backward.chunk
        return checkpoint_distance(plan.backward, num_steps, self.cost.backward_ops)

    def has_rest(self, num_steps: int, chunk: int) -> bool:
        """True if kernels with chunks of `chunk` steps have code for the remaining steps."""
        return True  # one binary serves every T

    def keep_plan(self, ncl: int, plan: LaunchPlan) -> None:
        """Stores a plan on disk, for steps of the size class of `ncl`."""
        limit = self.backend.size_class(ncl)
        tuned.save(self.plan_key(limit), plan)

    def forget_plans(self) -> None:
        """Reads plans from disk again, and prepares launches again."""
        with self._lock:
            self._plans.clear()
            self.speculations.clear()
            self.plans.clear()

    def plan_key(self, limit: int = 0) -> dict[str, str | int]:
        """Returns the key of this step's data on disk. `limit` is the `size_class`, or 0 for all sizes."""
        values = (*self.trace.inputs, *self.trace.states, *self.trace.lifted_values)
        key = tuned.step_key(self.core().name, tuple(v.dtype for v in values), self.device, limit)
        return {**key, "language": self.backend.target.name}

    def core(self, residuals: Residuals | None = None) -> CoreSource:
        """Returns the source of the step. With residuals, the step also returns the residuals."""
        with self._lock:
            if residuals not in self._cores:
                forward = (self.trace if residuals is None else residuals).forward
                self._cores[residuals] = self._emit_graph(forward, "step", takes_numbers=self._takes_numbers, once=True)
            return self._cores[residuals]

    def _emit(self, trace: StepTrace) -> CoreSource:
        """Returns the source of the step, which contains the step's numbers as constants."""
        return self._emit_graph(trace.forward, "step")

    def vjp(self, cotangents: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple[StepGraph, CoreSource | None]:
        """Returns the step's VJP and its source. The source is `None` if every gradient is zero."""
        return self._derive_with_source((cotangents, wanted), lambda: self._trace_vjp(cotangents, wanted))

    def _trace_vjp(self, cotangents: tuple[bool, ...], needs_grad: tuple[bool, ...]) -> StepGraph:
        self._renew_trace()
        with as_outside():
            return self.trace.vjp(cotangents, needs_grad)

    def residuals(self, wanted: tuple[bool, ...]) -> Residuals | None:
        """Returns the residuals that the forward saves in addition to its arguments; `None` for checkpoints.

        Args:
            wanted: for each of `[*inputs, *states, *lifted]`, True if its gradient will be needed.
        """
        if wanted not in self._residuals:
            with self._lock:
                self._residuals[wanted] = self._choose_residuals(wanted)
        return self._residuals[wanted]

    def _choose_residuals(self, needs_grad: tuple[bool, ...]) -> Residuals | None:
        trace = self.trace
        if self._policy == "recompute":
            return None
        try:
            vjp, _ = self.vjp(trace.differentiable, self.carrying(needs_grad))
        except Exception:
            if self._policy == "save":
                raise
            return None  # the error is raised later, if a gradient is needed
        chunk = self.plan(math.prod(trace.step_shape)).backward.chunk
        is_rounded = self.numerics.precision == "eager"
        return choose_residuals(trace, vjp, self._policy, rounded=is_rounded, chunk=chunk)

    def kept(self, residuals: Residuals | None) -> list[tuple[Port, torch.dtype]]:
        """Returns the values that the forward saves for the backward: residuals if there are any, else checkpoints."""
        if residuals is None:
            indices = (i for i in range(self.trace.num_states) if i not in dict(self.follows))
            return [(Port(Role.CHECKPOINT, i), self.trace.states[i].dtype) for i in indices]
        return [(Port(Role.SAVED, i), dtype) for i, dtype in enumerate(residuals.dtypes)]

    def vjp_of(self, residuals: Residuals, present: tuple[bool, ...]) -> tuple[StepGraph, CoreSource | None]:
        """Returns a VJP that reads residuals, and its source. The source is `None` if every gradient is zero.

        Args:
            present: for each output, True if its gradient is present.
        """
        cotangents = ports(Role.GRAD_OUTPUT, self.trace.num_outputs)
        absent = {
            port
            for port, is_present, flows in zip(cotangents, present, self.trace.differentiable, strict=False)
            if flows and not is_present
        }
        return self._derive_with_source((residuals, present), lambda: without_cotangents(residuals.vjp, absent))

    def columns(self, residuals: Residuals | None, present: tuple[bool, ...]) -> Columns:
        """Returns the VJP with respect to states only, which receives no gradients of outputs.

        Args:
            residuals: same as for `vjp_of`; `None` if the VJP recomputes intermediate values from inputs and states.
            present: for each output, True if its gradient is present in the VJP with respect to all arguments.
        """
        trace = self.trace
        states = trace.differentiable[trace.num_outputs :]
        first, first_lifted = trace.num_inputs, trace.num_inputs + trace.num_states
        if residuals is None:
            carried = tuple(value.dtype.is_floating_point for value in trace.states)
            needs_grad = ((False,) * first) + carried + (False,) * len(trace.lifted_values)
            key: Hashable = ("columns", states, needs_grad)

            def make() -> StepGraph:
                return self._trace_vjp(((False,) * trace.num_outputs) + states, needs_grad)
        else:
            vjp, _ = self.vjp_of(residuals, present)
            outputs = {port for port in vjp.arguments if port.role is Role.GRAD_OUTPUT}
            key = ("columns", residuals, present)

            def make() -> StepGraph:
                return without_cotangents(vjp, outputs)

        graph, source = self._derive_with_source(key, make, role="columns")
        return Columns(source, graph.gradients[first:first_lifted])

    def linear(self) -> tuple[StepGraph, CoreSource | None] | None:
        """Returns the linear part of an affine step, and its source if a state depends on states; otherwise `None`."""
        with self._lock:
            if self._linear is False:
                graph = linear_part(self.trace.forward)
                self._linear = None if graph is None else (graph, self._emit_vjp(graph, "linear"))
            return self._linear or None

    def flagged(self, presence: Presence, key: Hashable) -> tuple[StepGraph, CoreSource | None]:
        """Returns the VJP that takes the flags of a `Presence`, and its source.

        Args:
            key: value that is equal for equal VJPs.
        """
        return self._derive_with_source((key, presence.flags), presence.with_flags)

    def _derive_with_source(
        self, key: Hashable, make: Callable[[], StepGraph], role: str = "vjp"
    ) -> tuple[StepGraph, CoreSource | None]:
        """Returns the VJP that `make` computes once, and its source. The name of the source contains the role."""
        with self._lock:
            if key not in self._vjps:
                vjp = make()
                self._vjps[key] = (vjp, self._emit_vjp(vjp, role))
            return self._vjps[key]

    def _emit_vjp(self, vjp: StepGraph, role: str = "vjp") -> CoreSource | None:
        if not vjp.results:
            return None
        return self._emit_graph(vjp, role, fast_division=True, takes_numbers=self._takes_numbers, once=True)

    def _renew_trace(self) -> None:
        """Traces the core again if it captures other tensors now."""
        old = self.trace

        def computes_the_same(new: CoreTrace) -> bool:
            assert isinstance(new, StepTrace)
            return new.forward.layouts == old.forward.layouts and self._emit(new).name == self._emit(old).name

        new = self._retrace_if_changed(old, computes_the_same)
        assert isinstance(new, StepTrace)
        self.trace = new

    def forward_kernel(self, spec: ForwardSpec, residuals: Residuals | None = None) -> CompiledKernel:
        core = self.core(residuals)
        return self._find_kernel((spec, core.name), lambda: forward_source(f"{self.name}_forward", core, spec))

    def backward_kernel(self, spec: BackwardSpec, vjp: CoreSource) -> CompiledKernel:
        core = self.core()
        return self._find_kernel(
            (spec, vjp.name, core.name), lambda: backward_source(f"{self.name}_backward", core, vjp, spec)
        )

    def segments_in_words(self) -> list[str]:
        """Describes the parallel segments of the step's scans for users, with one line for each kind of scan."""
        with self._lock:
            forward = [f"forward: {speculation.in_words()}" for speculation in self.speculations.values()]
            affine = [
                f"forward over {steps} steps: {number} segments side by side, whose maps of states are combined, since "
                "the step is affine in its states and fast math allows other roundings"
                for steps, number in self.affine_segments.items()
            ]
            return [*forward, *affine] + [
                f"backward over {steps} steps: {number} segments side by side, whose maps of gradients are combined"
                for steps, number in self.combined.items()
            ]

    def close(self) -> None:
        """Drops the compiled kernels, and everything that was prepared for them."""
        with self._lock:
            super().close()
            self.plans.clear()


def _count_ops_on_lifted(step: StepGraph) -> int:
    """Returns the number of operations that depend on lifted tensors only."""
    lifted_nodes = {node for port, node in step.placeholders.items() if port.role is Role.LIFTED}
    count = 0
    for node in step.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and lifted_nodes.issuperset(node.all_input_nodes):
            lifted_nodes.add(node)
            count += 1
    return count


def _find_followers(step: StepGraph, late: Mapping[int, Late]) -> tuple[tuple[int, int], ...]:
    """Returns pairs of indices: a state, and the late input whose value is the new value of this state."""
    inputs = {step.placeholders.get(Port(Role.INPUT, i)): i for i in late}
    results = zip(step.results, step.entries, strict=True)
    return tuple((port.index, inputs[entry]) for port, entry in results if port.role is Role.STATE and entry in inputs)
