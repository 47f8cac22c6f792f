"""A call as data: its new memory, its launches, and the sums that follow the launches.

A function that cuts no dimensions works on whole tensors. The function has one step, which walks the shape to which the
arguments broadcast, and whose operands are whole tensors. A function that cuts dimensions may have steps of several
shapes, whose operands are parts of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_codegen.errors import ArgumentError
from flexsn_codegen.functions._division import Division, divide
from flexsn_codegen.functions._follow import Conditions, hold, integers
from flexsn_codegen.functions._host_numbers import Expression
from flexsn_codegen.functions._launch import BLOCK, Launcher
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._source import CoreSource, KernelSource, RowStage
from flexsn_codegen.targets import RowLaunch, Summed
from flexsn_graph import CellGraph, CellStep, Part, PointwiseGraph, Port, Role, StepGraph

MAX_PLANS = 1024

Source = tuple[bool, int]
"""The source of a result: `(True, i)` is argument `i`, and `(False, i)` is output `i` of the kernel."""


@dataclass(slots=True)
class Built:
    """A kernel for one layout of its operands, compiled at its first launch."""

    source: KernelSource
    kernel: Any = None

    def compiled(self) -> Any:
        """The compiled kernel in the form that its target launches."""
        if self.kernel is None:
            self.kernel = self.source.target.compile(self.source)
        return self.kernel


@dataclass(slots=True)
class TracedStep:
    """One kernel of a trace.

    Attributes:
        source: the function of one element that the kernel computes.
        slots: for each number among the kernel's arguments, the expression that computes it.
        cells: the parts of tensors that the kernel reads and writes. `None` if its operands are the whole tensors, in
            order.
    """

    source: CoreSource
    slots: Sequence[Expression]
    cells: CellStep | None
    built: dict[tuple[Any, ...], Built] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A function, traced for arguments of one kind. A trace is valid for all numbers for which its conditions hold.

    Attributes:
        name: name of its kernels.
        graph: the traced operations.
        steps: the kernels that compute the graph, usually one.
        conditions: decisions that depended on numbers, each with its outcome.
        written: positions of the arguments to which the function writes.
        shapes: shapes of the arguments in the trace. `None` if the trace is valid for all shapes.
        sources: for a gradient that also sums its results, the source of each result before the sum.
    """

    name: str
    graph: PointwiseGraph | CellGraph
    steps: Sequence[TracedStep]
    conditions: Conditions
    fast_math: bool
    written: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    sources: tuple[Source, ...] | None = None
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the results that are new memory."""
        return self.graph.dtypes[: len(self.graph.dtypes) - len(self.written)]

    @property
    def graphs(self) -> list[StepGraph]:
        """The graph of each step."""
        graph = self.graph
        return [step.step for step in graph.steps] if isinstance(graph, CellGraph) else [graph.step]

    def fits(self, numbers: Sequence[Any]) -> bool:
        """True if the trace is valid for a call with these numbers."""
        return hold(self.conditions, numbers)

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """True if the trace is valid for arguments of these shapes."""
        if self.shapes is None:
            return True
        assert isinstance(self.graph, CellGraph)
        sizes: dict[int, Any] = {}
        for tensor, traced, free in zip(tensors, self.shapes, self.graph.free, strict=True):
            for size, traced_size, number in zip(tensor.shape, traced, free, strict=True):
                if size != (traced_size if number is None else sizes.setdefault(number, size)):
                    return False
        return True

    def words(self, numbers: Sequence[Any]) -> list[list[int]]:
        """The numbers of a call, encoded as the integer arguments of each step's kernel."""
        return [integers(step.source, step.slots, numbers) for step in self.steps]

    def plan(
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor] = (), like: Sequence[int] = (), *, plain: bool = False
    ) -> Plan:
        """The plan of a call. It does not depend on the addresses of tensors or on numbers.

        Args:
            tensors: arguments, of which only shapes, strides and dtypes are used.
            outs: the tensors that receive the results. If empty, the results are new memory.
            like: for a trace with `sources`, the index of the tensor to whose shape each result is summed.
            plain: True if each kernel walks its elements one after the other, and has a separate operand for each
                argument and result of its step.
        """
        all_tensors = (*tensors, *outs)
        if any(type(size) is not int for t in all_tensors for size in (*t.shape, *t.stride())):
            return _build(self, tensors, outs, like, plain)  # the sizes are symbols of a compiler
        key = (len(outs), tuple(like), plain, *[(t.shape, t.stride()) for t in all_tensors])
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            plan = self.plans[key] = _build(self, tensors, outs, like, plain)
        return plan


@dataclass(frozen=True, slots=True)
class NewMemory:
    """Memory that a call allocates, for a result or for the terms of a sum."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def on(self, like: Tensor) -> Tensor:
        """Allocates the memory on the device of `like`."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a launch: its index in `[*tensors of the call, *new tensors]`, and its first element's offset."""

    tensor: int
    offset: int = 0

    def of(self, all_tensors: Sequence[Tensor]) -> Tensor:
        """The tensor whose memory starts at the operand's first element."""
        tensor = all_tensors[self.tensor]
        return tensor if self.offset == 0 else tensor.as_strided((1,), (1,), tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class PlannedLaunch:
    """One launch of a plan.

    Attributes:
        step: the index of the step in the trace.
        integers: the first integer arguments of the kernel. The integers for the call's numbers follow.
        numel: the number of elements, including the padding of rows.
        block, warps: elements and warps of a program on a GPU.
        fixed: True if the kernel is only valid for programs of `block` elements.
    """

    step: int
    built: Built
    operands: tuple[Operand, ...]
    integers: list[int]
    numel: int
    fast_math: bool
    block: int = BLOCK
    warps: int = 4
    fixed: bool = False
    _launcher: Launcher | None = None

    def tensors(self, all_tensors: Sequence[Tensor]) -> list[Tensor]:
        """The kernel's tensors, in order."""
        return [operand.of(all_tensors) for operand in self.operands]

    def run(self, all_tensors: Sequence[Tensor], words: Sequence[int]) -> None:
        """Launches the kernel, unless the launch has no elements.

        Args:
            all_tensors: `[*tensors of the call, *new tensors]`.
            words: the integers for the call's numbers.
        """
        if self.numel == 0:
            return
        tensors = self.tensors(all_tensors)
        launcher = self._launcher
        if launcher is None or not launcher.serves(tensors[0].device):
            kernel = self.built.compiled()
            launcher = self._launcher = Launcher(
                kernel,
                tensors,
                self.numel,
                fast_math=self.fast_math,
                block=self.block,
                warps=self.warps,
                fixed=self.fixed,
            )
        launcher(tensors, [*self.integers, *words])


@dataclass(frozen=True, slots=True)
class SummedPart:
    """A part of a result that is a sum of terms. A step writes the terms.

    Attributes:
        total: the sum of the terms.
        result: the index of the result among the new tensors.
        part: the position of the sum in the result.
        shape: the step's shape, with 1 for each dimension that is summed.
    """

    total: Total
    result: int
    part: Part
    shape: tuple[int, ...]

    def run(self, all_tensors: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Computes the sum and writes it to its position in the result."""
        self.total.into(all_tensors, self.part.view(new[self.result], self.shape))


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of a tensor over some of its dimensions.

    Attributes:
        tensor: the tensor's index in `[*tensors of the call, *new tensors]`.
        axes: the dimensions that are summed.
        turned: sizes of the remaining dimensions, and their permutation in the result. `None` if the dimensions keep
            their order.
        shape: shape of the result.
        dtype: dtype of the result.
    """

    tensor: int
    axes: tuple[int, ...]
    turned: tuple[tuple[int, ...], tuple[int, ...]] | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, all_tensors: Sequence[Tensor]) -> Tensor:
        """Computes the sum. A tensor that needs no change is returned as the same object, not as a view."""
        result = all_tensors[self.tensor]
        if self.axes:
            result = result.sum(self.axes, dtype=result.dtype)
        if self.turned is not None:
            result = result.view(self.turned[0]).permute(self.turned[1])
        if tuple(result.shape) != self.shape:
            result = result.reshape(self.shape)
        return result.to(self.dtype)

    def into(self, all_tensors: Sequence[Tensor], out: Tensor) -> None:
        """Writes the sum to a tensor of its shape."""
        terms = all_tensors[self.tensor]
        if self.axes and self.turned is None and out.dtype == terms.dtype and out.is_contiguous():
            torch.sum(terms, self.axes, out=out.view([n for d, n in enumerate(terms.shape) if d not in self.axes]))
        else:
            out.copy_(self.of(all_tensors))


@dataclass(frozen=True, slots=True)
class Plan:
    """The operations of a call, and its results.

    Attributes:
        new: memory that the call allocates. The results come first.
        dtypes: dtypes of the results. Sums in wider dtypes are converted to these dtypes.
        launches: the launches, in order.
        sums: parts of results that are summed after the launches.
        constants: `(index of a result, the number that fills this result)`.
        totals: the sums that are the results of a gradient. `None` if the results are the new memory.
    """

    new: tuple[NewMemory, ...]
    dtypes: tuple[torch.dtype, ...]
    launches: tuple[PlannedLaunch, ...]
    sums: tuple[SummedPart, ...] = ()
    constants: tuple[tuple[int, Any], ...] = ()
    totals: tuple[Total, ...] | None = None

    def allocate(self, like: Tensor) -> list[Tensor]:
        """Allocates the new memory."""
        return [memory.on(like) for memory in self.new]

    def results(self, like: Tensor) -> list[Tensor]:
        """Allocates tensors with the layouts and dtypes of the results."""
        pairs = zip(self.new, self.dtypes, strict=False)
        return [replace(memory, dtype=dtype).on(like) for memory, dtype in pairs]

    def run(
        self, tensors: Sequence[Tensor], words: Sequence[Sequence[int]], outs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Runs the plan and returns the results.

        Args:
            words: result of `Trace.words`.
            outs: the tensors that receive the results, if the plan was made with `outs`.
        """
        new = list(outs) or self.allocate(tensors[0])
        all_tensors = [*tensors, *new]
        for launch in self.launches:
            launch.run(all_tensors, words[launch.step])
        if self.totals is not None:
            return [total.of(all_tensors) for total in self.totals]
        if not self.sums and not self.constants:
            return new
        for summed in self.sums:
            summed.run(all_tensors, new)
        for result, constant in self.constants:
            new[result].fill_(constant)
        return [result.to(dtype) for result, dtype in zip(new, self.dtypes, strict=False)]


def remove_duplicates(graph: PointwiseGraph, cotangents: int) -> tuple[PointwiseGraph, tuple[Source, ...]]:
    """Removes duplicate results, and results that are arguments, from the graph of a gradient.

    Args:
        cotangents: the index of the first argument that may itself be a result.

    Returns:
        The graph without these results, and the source of each of the original results.
    """
    step = graph.step
    argument_indices = {node: i for i, node in enumerate(step.placeholders.values()) if i >= cotangents}
    result_indices: dict[Any, int] = {}
    sources: list[Source] = []
    for node in step.entries:
        if node in argument_indices:
            sources.append((True, argument_indices[node]))
        else:
            sources.append((False, result_indices.setdefault(node, len(result_indices))))
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(step.graph, copies)
    copied.output(tuple(copies[node] for node in result_indices))
    dtypes = tuple(node.meta["val"].dtype for node in result_indices)
    new_step = replace(step, graph=copied, results=step.results[: len(result_indices)])
    return replace(graph, step=new_step, dtypes=dtypes), tuple(sources)


# -- the builder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a tensor that a step reads or writes, in the step's shape."""

    operand: Operand
    strides: tuple[int, ...]


def _build(trace: Trace, tensors: Sequence[Tensor], outs: Sequence[Tensor], like: Sequence[int], plain: bool) -> Plan:
    if isinstance(trace.graph, CellGraph):
        return _build_parts(trace, tensors, plain)
    return _build_sums(trace, tensors, like) if trace.sources is not None else _build_whole(trace, tensors, outs, plain)


def _build_whole(trace: Trace, tensors: Sequence[Tensor], outs: Sequence[Tensor], plain: bool) -> Plan:
    shape, strides = plan_layout([*tensors, *outs])
    for i in trace.written:
        if tuple(tensors[i].shape) != shape:
            raise ArgumentError(
                f"{trace.name} writes to its tensor {i}, of shape {list(tensors[i].shape)}, but its arguments "
                f"broadcast to {list(shape)}: a tensor that is written in place must have this shape."
            )
    new = tuple(NewMemory(shape, strides, dtype) for dtype in trace.dtypes)
    count = len(tensors)
    inputs = [_View(Operand(i), tuple(t.expand(shape).stride())) for i, t in enumerate(tensors)]
    if outs:
        results = [_View(Operand(count + i), tuple(out.stride())) for i, out in enumerate(outs)]
    else:
        results = [_View(Operand(count + i), strides) for i in range(len(new))]
    outputs = [*results, *(inputs[i] for i in trace.written)]
    walk = _StepWalk(trace, 0, shape, strides, inputs, [frozenset()] * len(outputs), plain=plain)
    return Plan(new, trace.dtypes, (walk.launch(outputs, may_overlap=bool(trace.written or outs)),))


def _build_sums(trace: Trace, tensors: Sequence[Tensor], like: Sequence[int]) -> Plan:
    """The plan of a gradient. Result `n` has the shape of `tensors[like[n]]`."""
    assert trace.sources is not None
    assert isinstance(trace.graph, PointwiseGraph)
    shape, strides = plan_layout(tensors)
    count, dtypes = len(tensors), trace.graph.dtypes
    inputs = [_View(Operand(i), tuple(t.expand(shape).stride())) for i, t in enumerate(tensors)]
    summed = [_find_broadcast_axes(tensors[i].shape, shape) for i in like]
    # Several results may be sums of one output over different dimensions. If the kernel can compute all of these sums,
    # possibly except for the first one, it writes the output once for each sum. Otherwise, it writes the output once,
    # without a sum.
    output_by_sum: dict[tuple[int, frozenset[int]], int] = {}
    for i in range(len(dtypes)):
        sets = {axes for axes, source in zip(summed, trace.sources, strict=True) if source == (False, i)}
        output_by_sum[i, min(sets, key=len)] = i
    repeated = []
    for axes, (is_argument, i) in zip(summed, trace.sources, strict=True):
        if not is_argument and (i, axes) not in output_by_sum:
            output_by_sum[i, axes] = len(output_by_sum)
            repeated.append(i)
    walk = _StepWalk(trace, 0, shape, strides, inputs, [axes for _, axes in output_by_sum], repeated=repeated)
    if repeated and not walk.sums_each(repeated):
        kernel_sums = [frozenset() if i in repeated else axes for i, axes in list(output_by_sum)[: len(dtypes)]]
        repeated = []
        walk = _StepWalk(trace, 0, shape, strides, inputs, kernel_sums)
    written_results = [*range(len(dtypes)), *repeated]
    memory = [walk.memory(place, dtypes[i]) for place, i in enumerate(written_results)]
    launches = []
    if dtypes:
        outputs = [_View(Operand(count + i), view) for i, (_, view) in enumerate(memory)]
        launches.append(walk.launch(outputs, may_overlap=False))
    totals = []
    for axes, (is_argument, number), i in zip(summed, trace.sources, like, strict=True):
        total = Total(number, tuple(sorted(axes)), None, tuple(tensors[i].shape), tensors[i].dtype)
        if not is_argument:
            place = output_by_sum[number, axes] if repeated else number
            total = walk.total(place, replace(total, tensor=count + place))
        totals.append(total)
    return Plan(tuple(new for new, _ in memory), dtypes, tuple(launches), totals=tuple(totals))


def _find_broadcast_axes(tensor_shape: Sequence[int], shape: Sequence[int]) -> frozenset[int]:
    """The dimensions of `shape` along which a tensor of shape `tensor_shape` is broadcast."""
    missing = len(shape) - len(tensor_shape)
    return frozenset(d for d, n in enumerate(shape) if n != 1 and (d < missing or tensor_shape[d - missing] == 1))


def _build_parts(trace: Trace, tensors: Sequence[Tensor], plain: bool) -> Plan:
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
        new.append(_make_dense(shape, dtype))
    launches, sums = [], []
    for number, (step, shape) in enumerate(zip(graph.steps, shapes, strict=True)):
        inputs = [_make_view(part.tensor, part, tensors[part.tensor], shape) for part in step.inputs]
        summed = [frozenset(graph.results[part.tensor].summed) for part in step.outputs]
        places = [
            _make_view(len(tensors) + part.tensor, part, _make_meta(new[part.tensor]), shape) for part in step.outputs
        ]
        strides = _make_dense(shape, torch.float32).strides if summed[0] else places[0].strides
        order = torch.empty_like(torch.empty((), device="meta").as_strided(shape, strides), device="meta").stride()
        is_whole = [step.is_whole(part) for part in step.outputs]
        walk = _StepWalk(trace, number, shape, order, inputs, summed, is_whole, plain=plain)
        outputs = []
        for i, (part, dtype, axes) in enumerate(zip(step.outputs, step.dtypes, summed, strict=True)):
            if not axes:
                outputs.append(places[i])
                continue
            memory, strides = walk.memory(i, dtype)
            tensor = len(tensors) + len(new)
            written = shape if step.is_whole(part) else (*shape[:-1], 1)
            summed_shape = tuple(1 if d in axes else n for d, n in enumerate(written))
            total = Total(tensor, tuple(sorted(axes)), None, summed_shape, memory.dtype)
            sums.append(SummedPart(walk.total(i, total), part.tensor, part, summed_shape))
            outputs.append(_View(Operand(tensor), strides))
            new.append(memory)
        launches.append(walk.launch(outputs, may_overlap=False))
    return Plan(tuple(new), graph.dtypes, tuple(launches), tuple(sums), tuple(constants))


def _make_dense(shape: tuple[int, ...], dtype: torch.dtype) -> NewMemory:
    return NewMemory(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)


def _make_meta(memory: NewMemory) -> Tensor:
    return torch.empty_strided(memory.shape, memory.strides, device="meta")


def _make_view(number: int, part: Part, tensor: Tensor, shape: Sequence[int]) -> _View:
    view = part.view(tensor, shape)
    return _View(Operand(number, int(view.storage_offset() - tensor.storage_offset())), tuple(view.stride()))


class _StepWalk:
    """The walk of one step's kernel over its elements, and the memory for its sums.

    Args:
        shape: the step's shape.
        order: the order in which the kernel counts elements, as strides of this shape.
        inputs: all inputs of the step, including unused ones.
        summed: for each output, the dimensions over which it is summed.
        whole: in a step that reduces rows, for each output, True if the output has one element per element of a row,
            False if it has one element per row.
        repeated: for each additional output, the index of the result that is written to this output again. Additional
            outputs come last.
        plain: see `Trace.plan`.
    """

    def __init__(
        self,
        trace: Trace,
        number: int,
        shape: tuple[int, ...],
        order: Sequence[int],
        inputs: Sequence[_View],
        summed: Sequence[frozenset[int]],
        whole: Sequence[bool] = (),
        *,
        repeated: Sequence[int] = (),
        plain: bool = False,
    ) -> None:
        self._repeated = tuple(repeated)
        self._trace, self._number, self._shape, self._order, self._inputs = trace, number, shape, order, inputs
        self._whole = whole or [True] * len(summed)
        core = trace.steps[number].source if trace.steps else None
        if core is not None and repeated:
            extra_ports = (Port(Role.OUTPUT, len(core.results) + n) for n in range(len(repeated)))
            core = replace(core, results=(*core.results, *extra_ports))
        self._core = core
        self._walked: list[int] = []
        self._division: Division | None = None
        self._plain = plain
        if core is None:
            return
        # The outermost dimension comes first. Dimensions of one element are omitted, except for the last dimension of a
        # step that reduces rows.
        rows = bool(core.stages)
        self._walked = [d for d in sorted(range(len(shape) - rows), key=lambda d: -order[d]) if shape[d] != 1]
        leading = frozenset(self._walked)
        self._walked += [len(shape) - 1] if rows else []
        if rows:
            over_rows = [
                axes and leading <= axes and is_present for axes, is_present in zip(summed, self._whole, strict=True)
            ]
            over_rows = [is_over_rows and all(type(n) is int and n > 0 for n in shape) for is_over_rows in over_rows]
            sums = tuple(Summed.OVER_ROWS if is_over_rows else Summed.NOT for is_over_rows in over_rows)
            self._division = Division(len(self._walked) - 1, sums)
        elif not plain:
            strides = [inputs[port.index].strides for port in core.arguments]
            places = {d: i for i, d in enumerate(self._walked)}
            walked = [[operand_strides[d] for d in self._walked] for operand_strides in strides]
            sets = [frozenset(places[d] for d in axes if d in places) for axes in summed]
            self._division = divide(core.target, [shape[d] for d in self._walked], walked, sets)
        self._rows = self._plan_rows() if self._division is not None else None

    def _plan_rows(self) -> RowLaunch:
        assert self._division is not None
        assert self._core is not None
        split, sums = self._division.split, self._division.sums
        reduces = Summed.OVER_COLUMNS in sums or any(stage.reductions for stage in self._core.stages)
        count, width = (
            math.prod(self._shape[d] for d in part) for part in (self._walked[:split], self._walked[split:])
        )
        return self._core.target.row_launch(self._core, count, width, reduces=reduces, sums=Summed.OVER_ROWS in sums)

    def sums_each(self, repeated: Sequence[int]) -> bool:
        """True if the kernel computes the sums of all additional outputs."""
        return all(self._get_sum(len(self._whole) - 1 - n) is not Summed.NOT for n in range(len(repeated)))

    def _get_sum(self, i: int) -> Summed:
        return Summed.NOT if self._division is None else self._division.sums[i]

    def memory(self, i: int, dtype: torch.dtype) -> tuple[NewMemory, tuple[int, ...]]:
        """New memory for an output, and its strides over the step's shape. A summed output needs less memory."""
        kind = self._get_sum(i)
        if kind is Summed.OVER_ROWS:
            assert self._rows is not None
            width = math.prod(self._shape[d] for d in self._list_columns())
            return _make_dense((self._rows.programs, width), register_dtype(dtype)), (0,) * len(self._shape)
        if kind is Summed.OVER_COLUMNS:
            removed = self._list_columns()
            dtype = register_dtype(dtype)
        elif not self._whole[i]:
            removed = [len(self._shape) - 1]
        else:
            return NewMemory(self._shape, tuple(self._order), dtype), tuple(self._order)
        result = _make_dense(tuple(1 if d in removed else n for d, n in enumerate(self._shape)), dtype)
        return result, tuple(0 if d in removed else stride for d, stride in enumerate(result.strides))

    def total(self, i: int, full_total: Total) -> Total:
        """The sum that remains after the kernel for output `i`, which is `full_total` if the kernel does not sum it."""
        kind = self._get_sum(i)
        if kind is Summed.OVER_COLUMNS:
            columns = self._list_columns()
            return replace(full_total, axes=tuple(d for d in full_total.axes if d not in columns))
        if kind is Summed.OVER_ROWS:
            columns = self._list_columns()
            order = tuple(sorted(range(len(columns)), key=columns.__getitem__))
            is_in_order = order == tuple(range(len(columns)))
            turned = None if is_in_order else (tuple(self._shape[d] for d in columns), order)
            return replace(full_total, axes=(0,), turned=turned)
        return full_total

    def _list_columns(self) -> list[int]:
        assert self._division is not None
        return self._walked[self._division.split :]

    def launch(self, outputs: Sequence[_View], *, may_overlap: bool) -> PlannedLaunch:
        """The launch of the step's kernel.

        Args:
            may_overlap: True if the kernel may write to a tensor that it also reads.
        """
        trace, core, division, rows = self._trace, self._core, self._division, self._rows
        assert core is not None
        step = trace.steps[self._number]
        views = [*(self._inputs[port.index] for port in core.arguments), *outputs]
        operands = tuple(view.operand for view in views)
        sizes = [self._shape[d] for d in self._walked]
        strides = [[v.strides[d] for d in self._walked] for v in views]
        target, name = core.target, f"{trace.name}_kernel"
        if division is None or rows is None:
            woven = self._count_woven(outputs) if target.weaves and not (may_overlap or self._plain) else 1
            if woven > 1:
                return self._launch_woven(views, woven)
            walk = target.plain_walk if self._plain else target.walk
            layouts, numbers = walk(sizes, strides)
            key = (layouts, may_overlap)
            built = step.built.get(key)
            if built is None:
                built = step.built[key] = Built(target.pointwise(name, core, layouts, may_overlap=may_overlap))
            numel = math.prod(self._shape)
            return PlannedLaunch(self._number, built, operands, [numel, *numbers], numel, trace.fast_math)
        split = division.split
        sums = [Summed.NOT] * len(core.arguments) + list(division.sums)
        if target.columns_in_runs and len(sizes) - split > 1:
            sizes = [*sizes[:split], math.prod(sizes[split:])]
            strides = [[*operand_strides[:split], operand_strides[-1]] for operand_strides in strides]
        preceding = _find_preceding(views, strides, sums, len(core.arguments))
        layouts, numbers = target.walk_rows(sizes, strides, split, rows, sums, preceding)
        key = (layouts, may_overlap)
        built = step.built.get(key)
        if built is None:
            in_rows = core if core.stages else _make_single_stage(core, trace.graphs[self._number], self._repeated)
            built = step.built[key] = Built(target.row_kernel(name, in_rows, layouts, may_overlap=may_overlap))
        numel = rows.programs * rows.beside * rows.block
        fixed = rows.beside > 1 or Summed.OVER_ROWS in sums
        count = math.prod(sizes[:split])
        return PlannedLaunch(
            self._number, built, operands, [count, *numbers], numel, trace.fast_math, rows.block, rows.warps, fixed
        )

    def _count_woven(self, outputs: Sequence[_View]) -> int:
        """The number of outputs that are interleaved element by element in memory. 1 if they are not interleaved."""
        first = outputs[0]
        count = sum(view.operand.tensor == first.operand.tensor for view in outputs)
        if not 2 <= count <= _MOST_WOVEN or len(outputs) % count or not self._walked:
            return 1
        for i, view in enumerate(outputs):
            begin = outputs[i - i % count]
            place = Operand(begin.operand.tensor, begin.operand.offset + i % count)
            if view.operand != place or view.strides != begin.strides or view.strides[self._walked[-1]] != count:
                return 1
        return count

    def _launch_woven(self, views: Sequence[_View], count: int) -> PlannedLaunch:
        trace, core = self._trace, self._core
        assert core is not None
        inputs = len(core.arguments)
        passed_views = [*views[:inputs], *views[inputs::count]]
        sizes = [self._shape[d] for d in self._walked]
        strides = [[v.strides[d] for d in self._walked] for v in passed_views]
        # Interleaved results that fill one contiguous range of memory count as dense, so that no strides are passed.
        interleaved = [count * math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
        dense = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
        strides = [
            dense if i >= inputs and operand_strides == interleaved else operand_strides
            for i, operand_strides in enumerate(strides)
        ]
        layouts, numbers = core.target.walk(sizes, strides)
        step = trace.steps[self._number]
        key = ("woven", count, layouts)
        built = step.built.get(key)
        if built is None:
            source = core.target.woven_kernel(f"{trace.name}_kernel", core, layouts, count)
            built = step.built[key] = Built(source)
        numel = math.prod(self._shape) * count
        operands = tuple(view.operand for view in passed_views)
        return PlannedLaunch(self._number, built, operands, [numel, *numbers], numel, trace.fast_math)


def _find_preceding(
    views: Sequence[_View], strides: Sequence[Sequence[int]], sums: Sequence[Summed], inputs: int
) -> list[int | None]:
    """For each operand of a kernel on rows and columns, the operand whose elements directly precede its elements.

    `None` if there is no such operand.
    """
    result: list[int | None] = [None] * len(views)
    firsts: dict[tuple[Any, ...], int] = {}
    for i, (view, operand_strides, summed) in enumerate(zip(views, strides, sums, strict=True)):
        if summed is not Summed.NOT or operand_strides[-1] != 2:
            continue
        tensor, offset, rest = view.operand.tensor, view.operand.offset, (i < inputs, *operand_strides)
        result[i] = firsts.pop((tensor, offset - 1, rest), None)
        if result[i] is None:
            firsts[tensor, offset, rest] = i
    return result


# Maximum number of interleaved results. The kernel computes each element of the step once for each result.
_MOST_WOVEN = 4


def _make_single_stage(core: CoreSource, step: StepGraph, repeated: tuple[int, ...]) -> CoreSource:
    """A function of one element, as the only stage of a kernel on rows and columns.

    Args:
        repeated: see `_StepWalk`.
    """
    dtypes = tuple(node.meta["val"].dtype for node in step.entries)
    single_core = replace(core, results=core.results[: len(dtypes)])
    written = (*dtypes, *(dtypes[i] for i in repeated))
    return replace(core, stages=(RowStage(single_core, (), core.results, True, written, repeated),))
