"""A call as data: new memory, launches, and what becomes of what they write. One builder, one executor.

A function of whole tensors is one that cuts nothing: its one step walks the shape that its arguments broadcast to, and
each operand is a whole tensor. A function that cuts has steps of its own shapes, whose operands are parts of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError
from flexsn_codegen.functions._follow import Conditions, hold, integers
from flexsn_codegen.functions._host_numbers import Expression
from flexsn_codegen.functions._launch import BLOCK, Launcher
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import CellGraph, CellStep, Part, PointwiseGraph, StepGraph

MAX_PLANS = 1024


@dataclass(slots=True)
class Built:
    """A kernel for one layout of its operands; compiled at the first launch."""

    source: KernelSource
    kernel: Any = None

    def compiled(self) -> Any:
        """The kernel, as its target launches it."""
        if self.kernel is None:
            self.kernel = self.source.target.compile(self.source)
        return self.kernel


@dataclass(slots=True)
class TracedStep:
    """One kernel of a trace.

    Attributes:
        source: its function of one element.
        slots: for each number that the kernel takes, the expression that computes it.
        cells: the parts of tensors that it reads and writes; `None`: whole tensors, in order.
    """

    source: CoreSource
    slots: Sequence[Expression]
    cells: CellStep | None
    built: dict[tuple[Any, ...], Built] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A function for arguments of one kind. It serves all numbers that meet its conditions.

    Attributes:
        name: of its kernels.
        graph: what it does.
        steps: what computes it, mostly one.
        conditions: what was decided by the numbers, with its outcome.
        written: positions of the tensors that it changes.
        shapes: of the arguments that it was traced with; `None`: it serves all.
    """

    name: str
    graph: PointwiseGraph | CellGraph
    steps: Sequence[TracedStep]
    conditions: Conditions
    fast_math: bool
    written: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Allocations of the results that are new memory."""
        return self.graph.dtypes[: len(self.graph.dtypes) - len(self.written)]

    @property
    def graphs(self) -> list[StepGraph]:
        """The graph of each step."""
        graph = self.graph
        return [step.step for step in graph.steps] if isinstance(graph, CellGraph) else [graph.step]

    def fits(self, numbers: Sequence[Any]) -> bool:
        """True if a call with these numbers is traced alike."""
        return hold(self.conditions, numbers)

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """True if it serves arguments of these shapes."""
        if self.shapes is None:
            return True
        assert isinstance(self.graph, CellGraph)
        sizes: dict[int, Any] = {}
        for tensor, traced, free in zip(tensors, self.shapes, self.graph.free, strict=True):
            for size, known, number in zip(tensor.shape, traced, free, strict=True):
                if size != (known if number is None else sizes.setdefault(number, size)):
                    return False
        return True

    def words(self, numbers: Sequence[Any]) -> list[list[int]]:
        """The integers that each step's kernel takes for the numbers."""
        return [integers(step.source, step.slots, numbers) for step in self.steps]

    def plan(self, tensors: Sequence[Tensor], outs: Sequence[Tensor] = ()) -> Plan:
        """All of a call but where its tensors are, and its numbers.

        Args:
            tensors: shapes, strides, dtypes and the device are looked at.
            outs: what the results are written to; none: new memory.
        """
        every = (*tensors, *outs)
        if any(type(size) is not int for t in every for size in (*t.shape, *t.stride())):
            return _built(self, tensors, outs)  # symbols
        key = (len(outs), *[(t.shape, t.stride()) for t in every])
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            plan = self.plans[key] = _built(self, tensors, outs)
        return plan


@dataclass(frozen=True, slots=True)
class NewMemory:
    """Memory of a call: a result, or the terms of one that is summed."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def on(self, like: Tensor) -> Tensor:
        """A new tensor on the device of another one."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a launch: its number among those of the call and then the new ones, and the first element read."""

    tensor: int
    offset: int = 0

    def of(self, every: Sequence[Tensor]) -> Tensor:
        """The tensor whose memory begins at the operand's first element."""
        tensor = every[self.tensor]
        return tensor if self.offset == 0 else tensor.as_strided((1,), (1,), tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class PlannedLaunch:
    """One launch of a plan.

    Attributes:
        step: the number of the trace's step.
        integers: the kernel's, without those of the numbers, which come last.
        numel: the number of elements, with what rows are padded by.
        block, warps: of a program on a GPU.
    """

    step: int
    built: Built
    operands: tuple[Operand, ...]
    integers: list[int]
    numel: int
    fast_math: bool
    block: int = BLOCK
    warps: int = 4
    _launcher: Launcher | None = None

    def tensors(self, every: Sequence[Tensor]) -> list[Tensor]:
        """The kernel's tensors, in order."""
        return [operand.of(every) for operand in self.operands]

    def run(self, every: Sequence[Tensor], words: Sequence[int]) -> None:
        """Launches.

        Args:
            every: the tensors of the call, and then the new ones.
            words: the integers of the numbers.
        """
        if self.numel == 0:
            return
        tensors = self.tensors(every)
        launcher = self._launcher
        if launcher is None or not launcher.serves(tensors[0].device):
            kernel = self.built.compiled()
            launcher = self._launcher = Launcher(
                kernel, tensors, self.numel, fast_math=self.fast_math, block=self.block, warps=self.warps
            )
        launcher(tensors, [*self.integers, *words])


@dataclass(frozen=True, slots=True)
class Summed:
    """A result that is the sum of what a step has written.

    Attributes:
        terms, result: numbers of new tensors.
        part: where the sum is in the result.
        shape: of the step.
        axes: those that are summed.
    """

    terms: int
    result: int
    part: Part
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def run(self, new: Sequence[Tensor]) -> None:
        """Sums."""
        terms, once = new[self.terms], [1 if i in self.axes else n for i, n in enumerate(self.shape)]
        place = self.part.view(new[self.result], once)
        place.copy_(terms.sum(self.axes, dtype=terms.dtype, keepdim=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of one call, and its results.

    Attributes:
        new: its new memory; the results are first.
        dtypes: of the results, to which those that were summed in wider ones are converted.
        launches: in order.
        sums: what is summed after them.
        constants: by the number of a result, what all of it is.
    """

    new: tuple[NewMemory, ...]
    dtypes: tuple[torch.dtype, ...]
    launches: tuple[PlannedLaunch, ...]
    sums: tuple[Summed, ...] = ()
    constants: tuple[tuple[int, Any], ...] = ()

    @property
    def is_one_launch(self) -> bool:
        """True if nothing is done beside one launch."""
        return len(self.launches) == 1 and not self.sums and not self.constants

    def allocated(self, like: Tensor) -> list[Tensor]:
        """New memory."""
        return [memory.on(like) for memory in self.new]

    def results(self, like: Tensor) -> list[Tensor]:
        """Memory as that of the results."""
        pairs = zip(self.new, self.dtypes, strict=False)
        return [replace(memory, dtype=dtype).on(like) for memory, dtype in pairs]

    def run(
        self, tensors: Sequence[Tensor], words: Sequence[Sequence[int]], outs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The results, computed.

        Args:
            words: from `Trace.words`.
            outs: what the results are written to, where it was planned with such.
        """
        new = list(outs) or self.allocated(tensors[0])
        every = [*tensors, *new]
        for launch in self.launches:
            launch.run(every, words[launch.step])
        if not self.sums and not self.constants:
            return new
        for summed in self.sums:
            summed.run(new)
        for result, constant in self.constants:
            new[result].fill_(constant)
        return [result.to(dtype) for result, dtype in zip(new, self.dtypes, strict=False)]


# -- the builder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a tensor that a step reads or writes, in the step's shape."""

    operand: Operand
    strides: tuple[int, ...]


def _built(trace: Trace, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Plan:
    return _of_parts(trace, tensors) if isinstance(trace.graph, CellGraph) else _of_whole(trace, tensors, outs)


def _of_whole(trace: Trace, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Plan:
    shape, strides = plan_layout([*tensors, *outs])
    for i in trace.written:
        if tuple(tensors[i].shape) != shape:
            raise ArgumentError(
                f"{trace.name} writes to its tensor {i}, of shape {list(tensors[i].shape)}, and its arguments "
                f"broadcast to {list(shape)}: what is written in place has the shape of all."
            )
    new = tuple(NewMemory(shape, strides, dtype) for dtype in trace.dtypes)
    count = len(tensors)
    inputs = [_View(Operand(i), tuple(t.expand(shape).stride())) for i, t in enumerate(tensors)]
    if outs:
        results = [_View(Operand(count + i), tuple(out.stride())) for i, out in enumerate(outs)]
    else:
        results = [_View(Operand(count + i), strides) for i in range(len(new))]
    outputs = [*results, *(inputs[i] for i in trace.written)]
    launch = _launch(trace, 0, shape, strides, inputs, outputs, may_overlap=bool(trace.written or outs))
    return Plan(new, trace.dtypes, (launch,))


def _of_parts(trace: Trace, tensors: Sequence[Tensor]) -> Plan:
    graph = trace.graph
    assert isinstance(graph, CellGraph)
    shapes = [step.shape(tensors) for step in graph.steps]
    new: list[NewMemory] = []
    constants = []
    for i, (result, dtype) in enumerate(zip(graph.results, graph.dtypes, strict=True)):
        shape = result.shape(shapes[result.step] if result.step >= 0 else ())
        if result.step < 0:
            constants.append((i, result.constant))
        elif result.summed:
            step = graph.steps[result.step]
            dtype = next(d for part, d in zip(step.outputs, step.dtypes, strict=True) if part.tensor == i)
        new.append(_dense(shape, dtype))
    launches, sums = [], []
    for number, (step, shape) in enumerate(zip(graph.steps, shapes, strict=True)):
        outputs = []
        for part, dtype in zip(step.outputs, step.dtypes, strict=True):
            axes = graph.results[part.tensor].summed
            if axes:
                written = shape if step.is_whole(part) else (*shape[:-1], 1)
                terms = _dense(written, dtype)
                sums.append(Summed(len(new), part.tensor, part, written, axes))
                strides = terms.strides if written == shape else (*terms.strides[:-1], 0)
                outputs.append(_View(Operand(len(tensors) + len(new)), strides))
                new.append(terms)
            else:
                made = new[part.tensor]
                memory = torch.empty_strided(made.shape, made.strides, device="meta")
                outputs.append(_part(len(tensors) + part.tensor, part, memory, shape))
        inputs = [_part(part.tensor, part, tensors[part.tensor], shape) for part in step.inputs]
        order = torch.empty_like(
            torch.empty((), device="meta").as_strided(shape, outputs[0].strides), device="meta"
        ).stride()
        launches.append(_launch(trace, number, shape, order, inputs, outputs, may_overlap=False))
    return Plan(tuple(new), graph.dtypes, tuple(launches), tuple(sums), tuple(constants))


def _dense(shape: tuple[int, ...], dtype: torch.dtype) -> NewMemory:
    return NewMemory(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)


def _part(number: int, part: Part, tensor: Tensor, shape: Sequence[int]) -> _View:
    view = part.view(tensor, shape)
    return _View(Operand(number, int(view.storage_offset() - tensor.storage_offset())), tuple(view.stride()))


def _launch(
    trace: Trace,
    number: int,
    shape: tuple[int, ...],
    order: Sequence[int],
    inputs: Sequence[_View],
    outputs: Sequence[_View],
    *,
    may_overlap: bool,
) -> PlannedLaunch:
    """The launch of one step.

    Args:
        order: strides of the shape, in whose order the kernel counts.
        may_overlap: a tensor that is written may be one that is read.
    """
    step = trace.steps[number]
    numel = math.prod(shape)
    core = step.source
    views = [*(inputs[port.index] for port in core.arguments), *outputs]
    # Outermost first. Dimensions of one element are nowhere, but for rows.
    rows = bool(core.stages)
    leading = range(len(shape) - rows)
    walked = [d for d in sorted(leading, key=lambda d: -order[d]) if shape[d] != 1]
    walked += [len(shape) - 1] if rows else []
    sizes, strides = [shape[d] for d in walked], [[v.strides[d] for d in walked] for v in views]
    walk = core.target.walk_rows if rows else core.target.walk
    layouts, numbers = walk(sizes, strides)
    key = (layouts, may_overlap)
    built = step.built.get(key)
    if built is None:
        write = core.target.row_kernel if rows else core.target.pointwise
        source = write(f"{trace.name}_kernel", core, layouts, may_overlap=may_overlap)
        built = step.built[key] = Built(source)
    operands = tuple(view.operand for view in views)
    if rows:
        count = math.prod(shape[:-1])
        width, warps = core.target.padded_row(shape[-1])
        block = max(BLOCK, width)
        return PlannedLaunch(number, built, operands, [count, *numbers], count * width, trace.fast_math, block, warps)
    return PlannedLaunch(number, built, operands, [numel, *numbers], numel, trace.fast_math)
