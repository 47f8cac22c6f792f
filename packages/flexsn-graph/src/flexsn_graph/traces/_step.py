"""A traced time step of a neuron: its forward graph, captured tensors and VJP graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from flexsn_graph._torch_private import undisturbed
from flexsn_graph.cells import Elements, Pieces
from flexsn_graph.errors import (
    CaptureError,
    CoreReturnError,
    NonPointwiseError,
    RequiresGradError,
    StateMismatchError,
    TwoLayoutsError,
    UnsupportedCoreError,
    WrittenViewError,
)
from flexsn_graph.ir._ports import Port, Role, ports
from flexsn_graph.ir._step_graph import GRADIENTS, StepGraph
from flexsn_graph.lowering._normalize import normalize
from flexsn_graph.reads import Reads
from flexsn_graph.traces._elements import elements_of
from flexsn_graph.tracing._core import as_core_results, check_arity, unwrap_compiled
from flexsn_graph.tracing._prologue import Hoists
from flexsn_graph.tracing._tracer import Tracer


@dataclass(frozen=True, slots=True)
class StepValue:
    """Shape and dtype of one argument or result of a step."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> StepValue:
        return cls(tuple(tensor.shape), tensor.dtype)

    def of_batch(self, batch: int) -> StepValue:
        """A copy of this value with another size of the first dimension."""
        return StepValue((batch, *self.shape[1:]), self.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class CoreTrace:
    """A traced step function.

    Attributes:
        core, num_inputs, num_states, num_outputs: the arguments of the constructor. A compiled core is unwrapped.
        inputs, states, outputs: a `StepValue` for each tensor.
        captured: the captured tensors, each once, in order of first use. They are the user's own objects.
        captured_values: a `StepValue` for each captured tensor.
        aliases: other captured tensors that share their memory with a tensor in `captured`, each with the position of
            that tensor.
        lifted_values: a `StepValue` for each lifted tensor. `lift` computes lifted tensors from captured tensors.
        step_shape: the shape of every output and new state. If outputs and new states have different shapes, this is
            the shape with the most neurons in a `RecurrentTrace`, and the shape of the first result in a `CutTrace`.
        differentiable: for each of `[*outputs, *new_states]`, True if a gradient can flow through it.
        leads_to: for each output and new state, the positions in `[*inputs, *states, *lifted]` to which its gradient
            may flow.
        reads: the captured tensors and other values that the core read in addition to its arguments.
    """

    def __init__(
        self,
        core: Callable[..., Any],
        num_inputs: int,
        num_states: int,
        num_outputs: int,
        examples: Sequence[Tensor],
        follow: bool,
        hoists: Hoists,
        *,
        keep_views: bool = False,
        **kind: Any,
    ) -> None:
        self._kind = kind
        self.core = core
        self.num_inputs = num_inputs
        self.num_states = num_states
        self.num_outputs = num_outputs
        as_results = partial(as_core_results, num_outputs=num_outputs, num_states=num_states)
        self.reads = Reads(core, follow=follow)
        self._hoists, self._keep_views, self._reads_sizes = hoists, keep_views, False
        self._device = examples[0].device if examples else torch.device("cpu")
        with self.reads.restored():
            self._trace_all(partial(Tracer, core, examples, as_results, hoists=hoists, keep_views=keep_views))

    def _trace_all(self, make: Callable[..., Tracer]) -> None:
        tracer = make(reads=self.reads)
        self._tracer: Tracer | None = tracer
        self.differentiable, self.leads_to = tracer.differentiable, tracer.leads_to
        self.inputs = tuple(StepValue.of(t) for t in tracer.examples[: self.num_inputs])
        self.states = tuple(StepValue.of(t) for t in tracer.examples[self.num_inputs :])
        results = [StepValue.of(t) for t in tracer.results]
        self.outputs = tuple(results[: self.num_outputs])
        _check_states(self.states, results[self.num_outputs :])
        self.step_shape = self._find_shape(results)
        self._prologue = tracer.prologue()
        self.captured = self._prologue.captured
        self.aliases = tracer.aliases(self.captured)
        self.captured_values = tuple(StepValue.of(t) for t in self.captured)
        self.lifted_values = tuple(StepValue.of(t) for t in tracer.lifted_values)
        self._trace()
        self.reads.settle()
        self.reads.keep((*self.captured, *(alias for _, alias in self.aliases)))

    def _find_shape(self, results: Sequence[StepValue]) -> tuple[int, ...]:
        """The step's shape.

        Raises:
            CoreReturnError: the results have different shapes.
        """
        return _find_common_shape(results)

    def _trace(self) -> None:
        """Creates the graph of the forward."""
        raise NotImplementedError

    def of_twin(self, core: Callable[..., Any]) -> Self | None:
        """A copy of this trace, adapted to another core without running that core.

        Returns:
            `None` unless `core` has the same code as this trace's core, and reads equal numbers, the same or
            corresponding objects, and tensors with the same properties. See `reads/_twins.py`. The copy does not refer
            to the tensors of this trace.
        """
        core = unwrap_compiled(core)
        reads = self.reads.of_twin(core)
        if reads is None:
            return None
        count = len(self.captured)
        captured, aliases = reads.tensors[:count], reads.tensors[count:]
        if [StepValue.of(t) for t in captured] != list(self.captured_values) or not self.fits(captured):
            return None
        twin = copy(self)
        twin.core, twin.reads, twin.captured = core, reads, captured
        twin.aliases = tuple((i, alias) for (i, _), alias in zip(self.aliases, aliases, strict=True))
        twin._prologue = self._prologue.of(captured)
        twin._tracer, twin._reads_sizes = None, self.reads_sizes
        return twin

    @property
    def reads_sizes(self) -> bool:
        """True if the core, or a backward formula traced so far, may depend on the sizes of its arguments."""
        return self._reads_sizes or (self._tracer is not None and self._tracer.captures.reads_sizes)

    def of_batch(self, inputs: Sequence[StepValue], states: Sequence[StepValue]) -> Self | None:
        """A copy of this trace for another size of the step's first dimension. The core is not run.

        Returns:
            `None` if the arguments differ from the traced arguments in any other property, if the old or the new size
            is 0 or 1, or if the graph depends on the size. The graph depends on the size if the core reads sizes, or if
            a captured tensor varies along the first dimension.
        """
        old, values = self.step_shape, (*inputs, *states)
        traced_values = (*self.inputs, *self.states)
        sizes = {v.shape[0] for v in values if len(v.shape) == len(old)} - {1}
        if len(sizes) != 1 or not old or self.reads_sizes or len(values) != len(traced_values):
            return None
        (batch,) = sizes
        if min(batch, old[0]) < 2 or any(v.shape[:1] != old[:1] for v in self.outputs) or not self._is_of_any_batch():
            return None
        for value, traced in zip(values, traced_values, strict=True):
            is_whole = len(traced.shape) == len(old) and traced.shape[0] == old[0]
            if value != (traced.of_batch(batch) if is_whole else traced):
                return None
        resized = copy(self)
        resized.inputs, resized.states = tuple(inputs), tuple(states)
        resized.outputs = tuple(value.of_batch(batch) for value in self.outputs)
        resized.step_shape = (batch, *old[1:])
        resized._tracer, resized._reads_sizes = None, self.reads_sizes
        resized._resize(old[0], batch)
        return resized

    def _is_of_any_batch(self) -> bool:
        """True if the forward has the same graph for every size of the first dimension."""
        raise NotImplementedError

    def _resize(self, old: int, new: int) -> None:
        """Changes the size of the first dimension in the forward."""
        raise NotImplementedError

    def _get_tracer(self) -> Tracer:
        """The tracer. Runs the core again if the trace has no tracer.

        Copies that `of_twin` and `of_batch` return have no tracer until their first VJP.
        """
        if self._tracer is None:
            example = partial(torch.empty, (), device=self._device)
            examples = [example(dtype=v.dtype).expand(v.shape) for v in (*self.inputs, *self.states)]
            retraced = type(self)(
                self.core,
                self.num_inputs,
                self.num_states,
                self.num_outputs,
                examples,
                True,
                self._hoists,
                keep_views=self._keep_views,
                **self._kind,
            )
            self._tracer, self.reads = retraced._tracer, retraced.reads
            self._adopt(retraced)
        assert self._tracer is not None
        return self._tracer

    def _adopt(self, other: Self) -> None:
        """Copies the data that VJPs need from another trace of this core."""

    @property
    def lifted(self) -> tuple[Tensor, ...]:
        """The captured tensors, if all lifted tensors are captured tensors.

        Raises:
            CaptureError: some lifted tensors are computed from captured tensors before the loop. Call `lift` instead.
        """
        if self._prologue.computed is not None:
            first = self._prologue.computed.first
            raise CaptureError(
                f"the core calls {first.name} on captured tensors alone, which a kernel cannot do. Do it "
                "outside of the core, or before the loop, with `StepTrace.lift`.",
                first.name,
                first.location,
            )
        return self.captured

    def fits(self, captured: Sequence[Tensor]) -> bool:
        """True if `lift` accepts these tensors.

        Some recorded computations are only valid for the device and the strides of the traced tensors.
        """
        return self._prologue.fits(captured)

    def lift(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Computes the lifted tensors from the current values of captured tensors.

        Captured tensors are lifted unchanged, unless the core computes a value from captured tensors alone in a way
        that is impossible in a step. For example, the core may index or sum captured tensors, multiply matrices, or
        read one tensor in two layouts. `lift` computes such values once for all steps. `lift` is differentiable: the
        gradients of lifted tensors flow on to the captured tensors.

        Args:
            captured: for each tensor of `self.captured`, this tensor or another tensor of equal shape and dtype.

        Example:
            >>> w = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
            >>> step = trace_step(lambda x, v: (x * w[0], v * w[1]), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
            >>> [float(t) for t in step.lift(step.captured)]
            [0.5, 2.0]
        """
        return self._prologue(captured)

    def _check_masks(self, cotangents: Sequence[bool], requested: Sequence[bool]) -> None:
        expected = (len(self.differentiable), len(self._primals))
        if (len(cotangents), len(requested)) != expected:
            raise RequiresGradError(
                f"got masks for {len(cotangents)} results and {len(requested)} arguments; the step has "
                f"{expected[0]} results and {expected[1]} arguments (inputs, states, lifted)."
            )

    def _list_primal_values(self) -> tuple[StepValue, ...]:
        return (*self.inputs, *self.states, *self.lifted_values)

    @property
    def _primals(self) -> tuple[Port, ...]:
        counts = {
            Role.INPUT: self.num_inputs,
            Role.STATE: self.num_states,
            Role.LIFTED: len(self.lifted_values),
        }
        return tuple(port for role, count in counts.items() for port in ports(role, count))


class StepTrace(CoreTrace):
    """A traced pointwise step function. `trace_step` creates it.

    Attributes:
        forward: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`.
    """

    forward: StepGraph
    # Set for a step on pieces only.
    _elements: Elements | None = None

    def _trace(self) -> None:
        tracer = self._get_tracer()
        recorded = tracer.record_forward()
        if self.is_on_pieces:
            self._elements = elements_of(tracer, recorded, self.step_shape)
            self._count_pieces(self._elements.lifted)
            lowered, layouts = self._elements.module, self._elements.layouts
        else:
            lowered, layouts = tracer.lower(recorded, self.step_shape)
        graph = normalize(lowered, [port.name for port in self._primals])
        results = (*ports(Role.OUTPUT, self.num_outputs), *ports(Role.STATE, self.num_states))
        self.forward = StepGraph(graph, self._primals, results, layouts)

    @property
    def is_on_pieces(self) -> bool:
        """True for a step that may cut and join values. See `trace_step`."""
        return bool(self._kind.get("on_pieces"))

    def _count_pieces(self, lifted: Sequence[Pieces]) -> None:
        """Registers each piece of a lifted tensor as a lifted tensor."""
        values, positions_by_lifted = list[StepValue](), list[list[int]]()
        first = self.num_inputs + self.num_states
        for pieces, value in zip(lifted, self.lifted_values, strict=True):
            shape = value.shape if pieces.count == 1 else pieces.shape(value.shape)
            positions_by_lifted.append(list(range(first + len(values), first + len(values) + pieces.count)))
            values += [StepValue(shape, value.dtype)] * pieces.count
        self.lifted_values = tuple(values)
        self.leads_to = tuple(
            frozenset(
                new_position
                for position in positions
                for new_position in ([position] if position < first else positions_by_lifted[position - first])
            )
            for positions in self.leads_to
        )

    def lift(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        lifted = super().lift(captured)
        if self._elements is None:
            return lifted
        results: list[Tensor] = []
        for pieces, tensor in zip(self._elements.lifted, lifted, strict=True):
            results += [tensor] if pieces.count == 1 else pieces.split(tensor)
        return tuple(results)

    lift.__doc__ = CoreTrace.lift.__doc__

    def _is_of_any_batch(self) -> bool:
        return self.forward.is_of_any_batch

    def _resize(self, old: int, new: int) -> None:
        """Does nothing: the graph does not depend on sizes."""

    def _is_differentiated_alike(self) -> bool:
        """True if the core neither changes captured values nor defines their gradients, or if its VJP can be traced."""
        if self._get_tracer().is_plain:
            return True
        try:
            self.vjp(self.differentiable, [v.dtype.is_floating_point for v in self._list_primal_values()])
        except UnsupportedCoreError:
            return False
        return True

    def vjp(self, cotangents: Sequence[bool], wanted: Sequence[bool]) -> StepGraph:
        """The step's VJP, pruned to the cotangents that are present and the gradients that are required.

        Args:
            cotangents: for each of `[*outputs, *new_states]`, True if its gradient is an argument of the graph. All
                other gradients count as zero.
            wanted: for each of `[*inputs, *states, *lifted]`, True if its gradient is required. Only
                floating-point tensors have gradients.

        Returns:
            A graph from `[*inputs, *states, *lifted, *present cotangents]` to the gradients that are not zero.

        Raises:
            RequiresGradError: the masks do not fit the step.
            UnsupportedCoreError: a backward formula does something that a scan kernel cannot do.
        """
        self._check_masks(cotangents, wanted)
        primals = self._primals
        cotangent_ports = (*ports(Role.GRAD_OUTPUT, self.num_outputs), *ports(Role.GRAD_STATE, self.num_states))
        arguments = (
            *primals,
            *(port for port, is_present in zip(cotangent_ports, cotangents, strict=True) if is_present),
        )
        with undisturbed(), self.reads.restored():
            if self._elements is not None:
                return _remove_zeros(self._trace_vjp_in_elements(self._elements, cotangents, wanted, arguments))
            tracer = self._get_tracer()
            recorded, gradients = tracer.record_vjp(cotangents, wanted)
            lowered, layouts = tracer.lower(recorded, self.step_shape, gradients, self.forward.layouts)
            graph = normalize(lowered, [port.name for port in arguments])
        results = [
            Port(GRADIENTS[p.role], p.index)
            for p, position in zip(primals, gradients, strict=True)
            if position is not None
        ]
        return _remove_zeros(StepGraph(graph, arguments, tuple(results), layouts))

    def _trace_vjp_in_elements(
        self, elements: Elements, cotangents: Sequence[bool], requested: Sequence[bool], arguments: tuple[Port, ...]
    ) -> StepGraph:
        """The VJP of a step on pieces. See `vjp`."""
        count, requests = self.num_inputs + self.num_states, iter(requested)
        requested_pieces = [[next(requests)] for _ in range(count)]
        requested_pieces += [[next(requests) for _ in range(pieces.count)] for pieces in elements.lifted]
        tracer = self._get_tracer()
        recorded, gradients = tracer.record_vjp(cotangents, [any(pieces) for pieces in requested_pieces])
        backward_elements = elements_of(tracer, recorded, self.step_shape, gradients, elements)
        if backward_elements.lifted != elements.lifted:
            raise NonPointwiseError(
                "a backward formula cuts a captured tensor into other pieces than the step does. Capture the pieces as "
                "separate tensors.",
                "backward",
                None,
            )
        graph = normalize(backward_elements.module, [port.name for port in arguments])
        ports_of = iter(self._primals)
        results: list[Port] = []
        is_kept: list[bool] = []
        for pieces, position in zip(requested_pieces, gradients, strict=True):
            own_ports = [next(ports_of) for _ in pieces]
            if position is not None:
                results += [Port(GRADIENTS[port.role], port.index) for port in own_ports]
                is_kept += pieces
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        output.args = (
            tuple(entry for entry, is_requested in zip(output.args[0], is_kept, strict=True) if is_requested),
        )
        graph.eliminate_dead_code()
        results = [port for port, is_requested in zip(results, is_kept, strict=True) if is_requested]
        return StepGraph(graph, arguments, tuple(results), backward_elements.layouts)


def trace_step(
    core: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor],
    *,
    follow: bool = True,
    on_pieces: bool = False,
    hoist: bool = True,
) -> StepTrace:
    """Traces one time step, without data and without a GPU.

    Args:
        core: `core(*inputs, *states) -> (*outputs, *new_states)`, pointwise over the step's elements.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        example_inputs: inputs and states of one step, each of shape `[*step]`. An input may also broadcast to this
            shape. Only shape, dtype and device matter.
        follow: True to record in `reads` the values that the core reads in addition to its arguments.
        on_pieces: True if the core may join its arguments, reduce and multiply small dimensions of the joined values,
            and cut the results into pieces.
        hoist: True if `lift` computes the values that depend on captured tensors alone and that no step can compute.

    Raises:
        ExampleError: an example is not a dense tensor.
        CoreArityError: the core cannot take all inputs and states, or returns a different number of values.
        CoreReturnError: the core returns something other than tensors, or tensors of different shapes.
        StateMismatchError: a state changes shape or dtype.
        UnsupportedCoreError: the core does something that a scan kernel cannot do. The message names the op and the
            line.

    Example:
        >>> import torch
        >>> def core(x, v):
        ...     h = v + (x - v) / 2.0
        ...     s = (h >= 1.0).to(h.dtype)
        ...     return s, h * (1.0 - s)
        >>> step = trace_step(core, 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
        >>> [str(value) for value in step.outputs]
        ['[3] float32']
    """
    core = unwrap_compiled(core)
    check_arity(core, num_inputs, num_states, num_outputs, len(example_inputs))
    make = partial(StepTrace, core, num_inputs, num_states, num_outputs, example_inputs, follow, on_pieces=on_pieces)
    with undisturbed():
        if not hoist:
            return make(Hoists.NOTHING)
        try:
            return _trace_with_few_hoists(make)
        except WrittenViewError:
            return _trace_with_few_hoists(partial(make, keep_views=True))


def _trace_with_few_hoists(make: Callable[..., StepTrace]) -> StepTrace:
    """Creates a trace that computes as little as possible before the loop."""
    try:
        try:
            step = make(Hoists.IMPOSSIBLE_IN_STEP)
        except TwoLayoutsError:
            step = make(Hoists.VIEWS_TOO)
        if step._is_differentiated_alike():
            return step
    except WrittenViewError:
        raise
    except NonPointwiseError as error:
        if error._in_any_step:
            raise
        with suppress(UnsupportedCoreError, CoreReturnError):
            return make(Hoists.EVERYTHING)
        raise error from None
    with suppress(UnsupportedCoreError):
        hoisted = make(Hoists.EVERYTHING)
        if hoisted._is_differentiated_alike():
            return hoisted
    return step


def _remove_zeros(vjp: StepGraph) -> StepGraph:
    """The VJP without the gradients that are the constant 0."""
    zeros = [n.target is torch.ops.prims.scalar_tensor.default and n.args[0] == 0 for n in vjp.entries]
    positions = [i for i, is_zero in enumerate(zeros) if not is_zero]
    output = next(n for n in reversed(vjp.graph.nodes) if n.op == "output")
    output.args = (tuple(vjp.entries[i] for i in positions),)
    vjp.graph.eliminate_dead_code()
    return replace(vjp, results=tuple(vjp.results[i] for i in positions))


def _check_states(states: Sequence[StepValue], new_states: Sequence[StepValue]) -> None:
    """Raises if the step changes the shape or dtype of a state."""
    for i, (state, new) in enumerate(zip(states, new_states, strict=True)):
        if state != new:
            raise StateMismatchError(
                f"state {i} goes in as {state} and comes out as {new}: a state keeps its shape and dtype "
                "from step to step. Initialise the state as the core returns it, or convert the result in "
                "the core."
            )


def _find_common_shape(results: Sequence[StepValue]) -> tuple[int, ...]:
    """The step's shape. Raises if the results have different shapes."""
    shapes = sorted({value.shape for value in results})
    if len(shapes) != 1:
        raise CoreReturnError(
            f"the core returned shapes {', '.join(str(list(s)) for s in shapes)}: all outputs and "
            "states of a step must have one shape, the step's. Expand the smaller ones."
        )
    return shapes[0]
