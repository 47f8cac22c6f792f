"""The loop over time of a step with products, as one launch, if the device has room for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, KernelSource
from flexsn_codegen.errors import CompilationError, UnsupportedOpError
from flexsn_codegen.recurrent import (
    Load,
    Loop,
    LoopSpec,
    Multiply,
    NotOneLaunchError,
    StageCall,
    ValueLayout,
    loop_of,
    memory_of,
    two_strides,
)
from flexsn_codegen.targets.cuda import Cluster, ClusterKernel, CudaFunction, cluster_source
from flexsn_codegen.targets.triton._recurrent import COUNTER_DISTANCE, LoopKernel, Tiles, loop_source
from flexsn_graph import Port, Role, StagedStep, View
from flexsn_runtime._float32_precision import float32_precision
from flexsn_runtime._recent import Recent
from flexsn_runtime.calls._recorded import noted, noted_check, same_in_each_call
from flexsn_runtime.launches._cluster_launch import ClusterLaunch
from flexsn_runtime.launches._cooperative_launch import MARKS, CooperativeKernel
from flexsn_runtime.recurrent._clusters import clusters_are_enabled, clusters_for, most_turns, turns, why_no_clusters
from flexsn_runtime.recurrent._over_time import OverTime, Rows
from flexsn_runtime.recurrent._tiles import held_tiles, tiles_for

if TYPE_CHECKING:
    from flexsn_runtime.recurrent._staged import RecurrentSpecialization

# Maximum number of arrivals at a counter. Larger values mark programs that have given up.
_MOST_ARRIVALS = 1 << 29
# Maximum number of cluster divisions that are compiled to find a division with no more turns than estimated.
_MOST_COMPILED = 3
_PARTS = {"highest": 3, "high": 2, "medium": 1}
_Source = Callable[[OverTime], Tensor]


class Loops:
    """The loops of a step and of its VJPs, and the kernels that exist for them.

    Attributes:
        prepared: for each set of layouts of the loaded and stored values, the prepared launch, or the reason why one
            launch is impossible.
        descriptions: descriptions of the last ``"forward"`` and the last ``"backward"`` launch of more than one step.
    """

    def __init__(self) -> None:
        self._loops: dict[object, tuple[StagedStep, Loop | str]] = {}
        self._kernels: dict[object, tuple[LoopKernel, CooperativeKernel]] = {}
        self._cluster_kernels: dict[object, tuple[ClusterKernel, ClusterLaunch]] = {}
        self._memory: dict[object, tuple[tuple[Load, ...], tuple[View, ...]]] = {}
        self.prepared: Recent[InPrograms | InClusters | str] = Recent()
        self.descriptions: dict[str, str] = {}

    def loop(self, staged: StagedStep, lasting: frozenset[Port]) -> Loop:
        """Returns the loop of a step.

        Raises:
            NotOneLaunchError: one launch cannot compute the loop.
        """
        key = (id(staged), lasting)
        entry = self._loops.get(key)
        if entry is None:
            loop: Loop | str
            try:
                loop = loop_of(staged, lasting)
            except NotOneLaunchError as error:
                loop = str(error)
            entry = self._loops[key] = (staged, loop)
        if isinstance(entry[1], str):
            raise NotOneLaunchError(entry[1])
        return entry[1]

    def memory(self, staged: StagedStep, lasting: frozenset[Port]) -> tuple[tuple[Load, ...], tuple[View, ...]]:
        """Returns the loads and stores that a loop performs at each step."""
        key = (id(staged), lasting)
        if key not in self._memory:
            self._memory[key] = memory_of(self.loop(staged, lasting))
        return self._memory[key]

    def kernel(
        self, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, tiles: Tiles
    ) -> tuple[LoopKernel, CooperativeKernel]:
        """Returns the kernel of a loop: its source, and the compiled kernel."""
        key = (*_make_key(over, loop, memory), tiles, _find_counts(step, over))
        kernels = self._kernels.get(key)
        if kernels is None:
            cores = [step.core_of(part.stage) if isinstance(part, StageCall) else None for part in loop.parts]
            try:
                kernel = loop_source(_name_kernel(step, over), _make_spec(step, over, loop, memory, cores), tiles)
            except ValueError as error:
                raise NotOneLaunchError(f"a captured tensor has {error}") from None
            compiled = step.loop_kernel(kernel.source)
            programs = CooperativeKernel(compiled, tiles.rows, tiles.num_warps, step.device, together=tiles.exchanged)
            kernels = self._kernels[key] = (kernel, programs)
        return kernels

    def cluster_kernel(
        self, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, cluster: Cluster
    ) -> tuple[ClusterKernel, ClusterLaunch]:
        """Returns the kernel of a loop with clusters: its source, and the compiled kernel.

        Raises:
            NotOneLaunchError: clusters cannot compute the loop.
        """
        key = (*_make_key(over, loop, memory), cluster, _find_counts(step, over))
        kernels = self._cluster_kernels.get(key)
        if kernels is None:
            try:
                cores = [step.core_in_cuda(part.stage) if isinstance(part, StageCall) else None for part in loop.parts]
                kernel = cluster_source(_name_kernel(step, over), _make_spec(step, over, loop, memory, cores), cluster)
            except UnsupportedOpError as error:
                raise NotOneLaunchError(f"clusters cannot compute it: {error}") from None
            except ValueError as error:
                raise NotOneLaunchError(f"a captured tensor has {error}") from None
            launch = ClusterLaunch(kernel, cluster, step.device, fast_math=step.numerics.fast_math)
            kernels = self._cluster_kernels[key] = (kernel, launch)
        return kernels


def _name_kernel(step: RecurrentSpecialization, over: OverTime) -> str:
    return f"{step.name}_{'loop_backward' if over.backwards else 'loop'}"


def _make_key(over: OverTime, loop: Loop, memory: Memory) -> tuple[object, ...]:
    """Returns the key of a kernel. The division among programs is not part of the key."""
    strides = tuple((number, matrix.stride()) for number, matrix in memory.matrices.items())
    places = (tuple(place for _, place in memory.loads), tuple(place for _, place in memory.stores))
    return (id(over.staged), loop.lasting, places, strides, over.backwards, over.from_zero, parts_of_float32())


def _make_spec(
    step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, cores: Sequence[CoreSource | None]
) -> LoopSpec:
    """Returns the specification of a loop's kernel.

    Raises:
        NotOneLaunchError: a stage takes numbers as arguments.
    """
    if any(core.numbers for core in cores if core is not None):
        raise NotOneLaunchError("a stage takes numbers")
    strides = {number: matrix.stride() for number, matrix in memory.matrices.items()}
    loads, stores, parts = memory.loads, memory.stores, parts_of_float32()
    counts = _find_counts(step, over)
    return LoopSpec(loop, cores, loads, stores, strides, over.backwards, over.from_zero, counts, parts)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a kernel's values.

    Attributes:
        loads, stores: values that are loaded and stored at each step, each with its layout in memory.
        tensors: tensors of these values, by their ports in the kernel.
        numbers: strides that are arguments of the kernel, by name.
        matrices: matrices, by number.
    """

    loads: tuple[tuple[Load, ValueLayout], ...]
    stores: tuple[tuple[View, ValueLayout], ...]
    tensors: Mapping[Port, Tensor]
    numbers: Mapping[str, int]
    matrices: Mapping[int, Tensor]


def run_in_one_launch(step: RecurrentSpecialization, over: OverTime) -> str:
    """Runs the loop of a step in one launch.

    Returns:
        A description of the launch in words.

    Raises:
        NotOneLaunchError: this loop cannot run in one launch. No kernel has been launched.
    """
    return one_launch(step, over).run(over)


@dataclass(frozen=True)
class InClusters:
    """A loop over values of one layout, with thread-block clusters.

    Attributes:
        groups: number of groups of rows.
        numbers: integer arguments of the kernel.
        sources: for each tensor of the kernel, the function that returns this tensor.
        description: a description of the launch.
    """

    kernel: ClusterLaunch
    groups: int
    numbers: tuple[int, ...]
    sources: tuple[_Source, ...]
    description: str

    def run(self, over: OverTime) -> str:
        """Launches the loop, and returns a description in words."""
        tensors = self.tensors(over)
        noted(self.kernel.launch(tensors, self.groups, self.numbers), tensors)
        return self.description

    def compile(self, over: OverTime) -> CudaFunction:
        """Compiles the kernel.

        Raises:
            CompilationError: the GPU has too little room for the kernel.
        """
        return self.kernel.function(self.tensors(over))

    def tensors(self, over: OverTime) -> list[Tensor]:
        """Returns the tensors of the kernel, in the order of its parameters."""
        return [select(over) for select in self.sources]


@dataclass(frozen=True)
class InPrograms:
    """A loop over values of one layout, without clusters.

    Attributes:
        groups: number of groups of rows.
        numbers: integer arguments of the kernel.
        sources: for each tensor of the kernel, the function that returns this tensor.
    """

    loop: Loop
    tiles: Tiles
    kernel: CooperativeKernel
    groups: int
    numbers: tuple[int, ...]
    sources: tuple[_Source, ...]
    device: torch.device
    _descriptions: dict[int, str] = field(default_factory=dict)

    def run(self, over: OverTime) -> str:
        """Launches the loop, and returns a description in words.

        Raises:
            NotOneLaunchError: the device has no room for programs that share a row.
        """
        tensors = [select(over) for select in self.sources]
        launch = self.kernel.launch(tensors, self.numbers)  # already compiled if the call is recorded
        at_once = min(self.groups, launch.room // self.tiles.count)
        if at_once == 0:
            room, count = launch.room, self.tiles.count
            raise NotOneLaunchError(f"the device has room for {room} programs at a time, but {count} share a row")
        if not self.tiles.exchanged:  # no program waits for programs that run later
            at_once = self.groups
        noted_check(partial(MARKS.check, self.device), MARKS.on(self.device))
        noted(launch, tensors, at_once * self.tiles.count)
        return self.in_words(at_once)

    def room(self, over: OverTime) -> int:
        """Returns the number of programs that the device runs at a time. Compiles the kernel."""
        return self.kernel.launch([select(over) for select in self.sources], self.numbers).room

    def in_words(self, at_once: int) -> str:
        """Returns a description of a launch that runs `at_once` groups of rows at a time."""
        description = self._descriptions.get(at_once)
        if description is None:
            turns = -(-self.groups // at_once)
            count = len(self.loop.exchanged)
            exchanging = f"keep their part of the matrices and exchange {count} value{'s' if count > 1 else ''} a step"
            keeping = "keep the whole matrices" if self.loop.has_products else "have whole rows"
            description = self._descriptions[at_once] = (
                f"one launch for all steps, of {at_once * self.tiles.count} programs of {self.tiles.rows} rows x "
                f"{self.tiles.columns(self.loop.width)} columns, which "
                + (exchanging if self.tiles.exchanged else f"{keeping} and exchange nothing")
                + (f"; {turns} turns of {at_once} groups of rows" if turns > 1 else "")
            )
        return description


def one_launch_is_enabled() -> bool:
    """False if `FLEXSN_ONE_LAUNCH` is 0."""
    return os.environ.get("FLEXSN_ONE_LAUNCH", "1") != "0"


def parts_of_float32() -> int:
    """Returns the number of 16-bit parts into which products split a float32 value, by PyTorch's precision setting."""
    return _PARTS[float32_precision()]


def one_launch(step: RecurrentSpecialization, over: OverTime) -> InPrograms | InClusters:
    """Prepares and compiles the launch of `run_in_one_launch`. Raises the same errors."""
    if not one_launch_is_enabled():
        raise NotOneLaunchError("FLEXSN_ONE_LAUNCH is 0")
    if over.num_steps < 2:
        raise NotOneLaunchError("there is only one step")
    if over.arriving:
        raise NotOneLaunchError("the states after each step have gradients")
    reason = step.backend.why_not_together(step.device)
    if reason is not None:
        raise NotOneLaunchError(reason)
    loops, staged = step.loops, over.staged
    loop = loops.loop(staged, over.lasting)
    to_load, to_store = loops.memory(staged, over.lasting)
    rows = [over.reads[load.view.source] for load in to_load] + [over.writes[view.source] for view in to_store]
    layouts = [(r.first, r.memory.shape, r.memory.stride()) for r in rows]
    matrices = [matrix.stride() for matrix in over.matrices]
    counts = _find_counts(step, over)
    counting_input = None if counts is None else (counts, over.reads[counts].first)
    settings = clusters_are_enabled(), parts_of_float32()
    key = (id(staged), over.num_steps, over.lasting, over.from_zero, settings, counting_input, *layouts, *matrices)
    prepared = loops.prepared.get(key)
    if prepared is None:
        try:
            prepared = _prepare(step, over, loop)
        except NotOneLaunchError as error:  # later attempts would fail, too
            prepared = str(error)
        loops.prepared[key] = prepared
    if isinstance(prepared, str):
        raise NotOneLaunchError(prepared)
    return prepared


def _prepare(step: RecurrentSpecialization, over: OverTime, loop: Loop) -> InPrograms | InClusters:
    """Prepares the loop with clusters if a step has too many columns for one program but not for a cluster.

    Otherwise, prepares it with the first tiles whose programs have room on the device, or with the last tiles if no
    programs have room.
    """
    memory = _lay_out_memory(loop, over)
    in_clusters = _prepare_in_clusters(step, over, loop, memory)
    if in_clusters is not None:
        return in_clusters
    for tiles in tiles_for(loop, step.device, from_zero=over.from_zero):
        prepared = in_programs(step, over, loop, memory, tiles)
        if prepared.room(over) >= tiles.count:
            break
    return prepared


def in_programs(step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, tiles: Tiles) -> InPrograms:
    """Returns the loop for programs with these tiles. The kernel is generated but not compiled.

    Raises:
        NotOneLaunchError: programs cannot compute the loop.
    """
    if tiles.exchanged and over.num_steps * tiles.count * (len(loop.exchanged) + 1) > _MOST_ARRIVALS:
        raise NotOneLaunchError("there are too many steps for one counter")
    loop_kernel, kernel = step.loops.kernel(step, over, loop, memory, tiles)
    groups = -(-loop.num_rows // tiles.rows)
    sizes = {"T": over.num_steps, "B": loop.num_rows, **memory.numbers}
    numbers = tuple(sizes[size] for size in loop_kernel.source.sizes)
    exchanged = _list_exchanged(loop_kernel, groups, tiles.rows, step.device)
    counts = _find_counts(step, over)
    if counts is not None:
        exchanged[Port(Role.COUNTER, 2)] = partial(_count_remaining, port=counts, rows=step.trace.step_shape[:-1])
    sources = tuple(_list_sources(step.loops, over, memory, loop_kernel.source, exchanged, step.device))
    return InPrograms(loop, tiles, kernel, groups, numbers, sources, step.device)


def _prepare_in_clusters(
    step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory
) -> InClusters | None:
    """Returns the loop with clusters; `None` if one program holds all columns, or clusters cannot compute the loop."""
    device = step.device
    if why_no_clusters(device) is not None or loop.reduced or loop.ring:
        return None
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if held_tiles(loop, processors, from_zero=over.from_zero) is not None:
        return None
    kind = {"from_zero": over.from_zero, "backwards": over.backwards}
    limit = most_turns(loop, **kind)
    best: tuple[int, InClusters] | None = None
    for cluster in islice(clusters_for(loop, processors, **kind), _MOST_COMPILED):
        try:
            prepared = in_cluster(step, over, loop, memory, cluster)
        except NotOneLaunchError:
            return None
        try:
            at_once = prepared.compile(over).at_once
        except CompilationError:
            continue
        num_turns = -(-prepared.groups // at_once) if at_once else prepared.groups
        if (limit is None or num_turns <= limit) and (best is None or num_turns < best[0]):
            best = num_turns, prepared
        if num_turns <= turns(loop, cluster, processors, from_zero=over.from_zero):
            break
    return None if best is None else best[1]


def in_cluster(
    step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, cluster: Cluster
) -> InClusters:
    """Returns the loop for clusters of this division. The kernel is generated but not compiled.

    Raises:
        NotOneLaunchError: clusters cannot compute the loop.
    """
    cluster_kernel, kernel = step.loops.cluster_kernel(step, over, loop, memory, cluster)
    sizes = {"T": over.num_steps, "B": loop.num_rows, **memory.numbers}
    numbers = tuple(sizes[size] for size in cluster_kernel.source.sizes)
    sources = tuple(_list_sources(step.loops, over, memory, cluster_kernel.source, {}, step.device))
    groups = -(-loop.num_rows // cluster.rows)
    count = len(loop.exchanges)
    description = (
        f"one launch for all steps, of {groups} clusters of {cluster.blocks} blocks of {cluster_kernel.threads} "
        f"threads, each of {cluster.rows} rows, which keep the matrices in registers and send each other "
        f"{count} value{'s' if count > 1 else ''} a step"
    )
    return InClusters(kernel, groups, numbers, sources, description)


def _list_exchanged(kernel: LoopKernel, groups: int, rows: int, device: torch.device) -> dict[Port, _Source]:
    """Returns functions that return the memory through which programs exchange values, and the counters of arrivals.

    Args:
        groups: number of groups, each with `rows` rows.
    """
    sources: dict[Port, _Source] = {}
    for i, (dtype, parts, columns) in enumerate(kernel.slots):
        shape = (2, parts, groups * rows, columns)
        sources[Port(Role.OPERAND, i)] = partial(_allocate_slot, shape=shape, dtype=dtype, device=device)
    count = groups * COUNTER_DISTANCE
    sources[Port(Role.COUNTER, 0)] = lambda over: torch.zeros(count, dtype=torch.int32, device=device)
    sources[Port(Role.COUNTER, 1)] = lambda over: same_in_each_call(MARKS.on(device))
    return sources


def _list_sources(
    loops: Loops,
    over: OverTime,
    memory: Memory,
    kernel: KernelSource,
    exchanged: Mapping[Port, _Source],
    device: torch.device,
) -> Iterator[_Source]:
    """Yields functions that return the tensors of a kernel, in the order of its parameters.

    For a value of several steps, the function returns a tensor at the first address that the kernel uses.

    Args:
        exchanged: functions that return the memory through which programs exchange values.
    """
    loop = loops.loop(over.staged, over.lasting)
    to_load, to_store = loops.memory(over.staged, over.lasting)
    values = [(view.source, over.reads[view.source]) for view, _ in to_load]
    values += [(view.source, over.writes[view.source]) for view in to_store]
    sources = dict(exchanged)
    for (name, tensor), (port, rows) in zip(memory.tensors.items(), values, strict=True):
        if tensor.untyped_storage().data_ptr() != rows.memory.untyped_storage().data_ptr():
            raise NotOneLaunchError(f"{port.name} is read in an order that its memory does not have")
        offset = int(tensor.storage_offset() - rows.memory.storage_offset())
        sources[name] = partial(_select_beginning, port=port, written=name.role is Role.OUTPUT, offset=offset)
    first, last = (over.num_steps - 1, 0) if over.backwards else (0, over.num_steps - 1)
    for i, port in enumerate(loop.carried):
        sources[Port(Role.STATE, i)] = partial(_select_row, port=port, written=False, t=first)
        sources[Port(Role.FINAL_STATE, i)] = partial(_select_row, port=port, written=True, t=last)
    for i, (port, (width, dtype)) in enumerate(loop.carried.items()):
        if port in loop.ring:
            shape = 2, loop.num_rows, width
            sources[Port(Role.RING, i)] = partial(_allocate_slot, shape=shape, dtype=dtype, device=device)
    for number in memory.matrices:
        sources[Port(Role.MATRIX, number)] = partial(_select_matrix, number=number)
    for part in loop.parts:
        if isinstance(part, StageCall):
            for i, layout in part.stage.graph.layouts.items():
                sources[Port(Role.LIFTED, i)] = partial(_select_lifted, i=i, offset=layout.offset, device=device)
    for port in kernel.params:
        yield sources[port]


def _select_beginning(over: OverTime, *, port: Port, written: bool, offset: int) -> Tensor:
    """Returns a tensor at the first address that a kernel uses: `offset` elements after the beginning of the value."""
    memory = (over.writes if written else over.reads)[port].memory
    return memory.as_strided((1,), (1,), memory.storage_offset() + offset) if offset else memory


def _select_row(over: OverTime, *, port: Port, written: bool, t: int) -> Tensor:
    """Returns a value at step `t`."""
    rows = (over.writes if written else over.reads)[port]
    return rows.memory[(rows.first + t) % rows.memory.shape[0]]


def _find_counts(step: RecurrentSpecialization, over: OverTime) -> Port | None:
    """Returns the input that counts the remaining steps of rows; `None` unless all columns of a row end together."""
    port = step.ending
    if port is None:
        return None
    memory = over.reads[port].memory
    return port if memory.dim() > 1 and (memory.shape[-1] == 1 or memory.stride(-1) == 0) else None


def _count_remaining(over: OverTime, *, port: Port, rows: tuple[int, ...]) -> Tensor:
    """Returns each row's number of remaining steps before the first step."""
    counts = over.reads[port]
    return counts.memory[counts.first, ..., 0].expand(rows).reshape(-1).contiguous()


def _select_matrix(over: OverTime, *, number: int) -> Tensor:
    return over.matrices[number]


def _allocate_slot(over: OverTime, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates memory for a value between two steps."""
    return torch.empty(shape, dtype=dtype, device=device)


def _select_lifted(over: OverTime, *, i: int, offset: int, device: torch.device) -> Tensor:
    return over.lifted[i].to(device).contiguous().resolve_neg().view(-1)[offset:]


def _lay_out_memory(loop: Loop, over: OverTime) -> Memory:
    num_steps = over.num_steps
    tensors: dict[Port, Tensor] = {}
    numbers: dict[str, int] = {}

    def place(port: Port, rows: Rows, shape: tuple[int, ...]) -> ValueLayout:
        sequence = rows.sequence
        missing = len(shape) + 1 - sequence.dim()  # dimensions that a value lacks if it broadcasts to the step
        memory = sequence[(slice(None), *(None,) * missing)].expand(num_steps, *shape)
        tensors[port] = memory
        try:
            row, column = two_strides(shape, memory.stride()[1:])
        except ValueError as error:
            raise NotOneLaunchError(f"a value has {error}") from None
        time = memory.stride(0)
        if column == 1 and time == loop.num_rows * row:
            return ValueLayout(row)
        numbers.update({f"{port.name}_time": time, f"{port.name}_row": row, f"{port.name}_column": column})
        return ValueLayout(None)

    to_load, to_store = memory_of(loop)
    loads = [
        (load, place(Port(Role.INPUT, i), over.reads[load.view.source].through(load.view), load.shape))
        for i, load in enumerate(to_load)
    ]
    stores = []
    for i, view in enumerate(to_store):
        rows = over.writes[view.source].through(view)
        stores.append((view, place(Port(Role.OUTPUT, i), rows, tuple(rows.memory.shape[1:]))))
    matrix_numbers = {
        number for part in loop.parts if isinstance(part, Multiply) for number in (part.matrix, part.added)
    }
    matrices = {number: over.matrices[number] for number in sorted(n for n in matrix_numbers if n is not None)}
    return Memory(tuple(loads), tuple(stores), tensors, numbers, matrices)
