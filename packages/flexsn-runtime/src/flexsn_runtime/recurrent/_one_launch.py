"""The loop over time of a step with products in one launch, where the device has room for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsn_codegen import TRITON
from flexsn_codegen.recurrent import (
    COUNTER_DISTANCE,
    Call,
    Load,
    Loop,
    LoopKernel,
    Multiply,
    NotOneLaunchError,
    Place,
    Tiles,
    loop_of,
    loop_source,
    memory_of,
    two_strides,
)
from flexsn_graph import Port, Role, StagedStep, View
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._recent import Recent
from flexsn_runtime.launches._cooperative_launch import MARKS, CooperativeLaunch
from flexsn_runtime.recurrent._tiles import tiles_for

if TYPE_CHECKING:
    from flexsn_runtime.recurrent._staged import RecurrentSpecialization, Rows

# More arrivals at one counter than that would reach the mark of programs that gave up.
_MOST_ARRIVALS = 1 << 29


class Loops:
    """The loops of a step and its VJPs, and the kernels made of them so far.

    Attributes:
        prepared: by layouts of what is loaded and stored.
        told: what became of the last ``"forward"`` and ``"backward"`` of more than one step, in words.
    """

    def __init__(self) -> None:
        self._loops: dict[object, tuple[StagedStep, Loop | str]] = {}
        self._kernels: dict[object, tuple[LoopKernel, CooperativeLaunch]] = {}
        self._memory: dict[object, tuple[tuple[Load, ...], tuple[View, ...]]] = {}
        self.prepared: Recent[_Prepared] = Recent()
        self.told: dict[str, str] = {}

    def loop(self, staged: StagedStep, lasting: frozenset[Port]) -> Loop:
        """The loop of a step.

        Raises:
            NotOneLaunchError: there is none that one launch computes.
        """
        key = (id(staged), lasting)
        found = self._loops.get(key)
        if found is None:
            loop: Loop | str
            try:
                loop = loop_of(staged, lasting)
            except NotOneLaunchError as error:
                loop = str(error)
            found = self._loops[key] = (staged, loop)
        if isinstance(found[1], str):
            raise NotOneLaunchError(found[1])
        return found[1]

    def memory(self, staged: StagedStep, lasting: frozenset[Port]) -> tuple[tuple[Load, ...], tuple[View, ...]]:
        """What the loop of a step loads and stores at each step."""
        key = (id(staged), lasting)
        if key not in self._memory:
            self._memory[key] = memory_of(self.loop(staged, lasting))
        return self._memory[key]

    def kernel(
        self,
        step: RecurrentSpecialization,
        staged: StagedStep,
        loop: Loop,
        memory: Memory,
        tiles: Tiles,
        *,
        backwards: bool,
        from_zero: bool,
    ) -> tuple[LoopKernel, CooperativeLaunch]:
        """The kernel of a loop, and what launches it."""
        places = (tuple(place for _, place in memory.loads), tuple(place for _, place in memory.stores))
        strides = {number: matrix.stride() for number, matrix in memory.matrices.items()}
        key = (id(staged), loop.lasting, places, tuple(strides.items()), tiles, backwards, from_zero)
        found = self._kernels.get(key)
        if found is None:
            cores = [step.core_of(part.stage) if isinstance(part, Call) else None for part in loop.parts]
            written = [core for core in cores if core is not None]
            if any(core.target is not TRITON for core in written):
                raise NotOneLaunchError("its kernels are not written in Triton")
            if any(core.numbers for core in written):
                raise NotOneLaunchError("a stage takes numbers")
            try:
                kernel = loop_source(
                    f"{step.name}_{'loop_backward' if backwards else 'loop'}",
                    loop,
                    cores,
                    [(load, place) for (load, _), place in zip(memory.loads, places[0], strict=True)],
                    [(store, place) for (store, _), place in zip(memory.stores, places[1], strict=True)],
                    strides,
                    tiles,
                    backwards=backwards,
                    from_zero=from_zero,
                )
            except ValueError as error:
                raise NotOneLaunchError(f"a captured tensor has {error}") from None
            compiled = step.loop_kernel(kernel.source)
            launch = CooperativeLaunch(compiled, tiles.rows, tiles.num_warps, step.device)
            found = self._kernels[key] = (kernel, launch)
        return found


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a kernel's values are.

    Attributes:
        loads, stores: what is loaded and stored at each step, with where it is.
        tensors: of these, by the kernel's names for them.
        numbers: the distances that are arguments.
        matrices: by number.
    """

    loads: tuple[tuple[Load, Place], ...]
    stores: tuple[tuple[View, Place], ...]
    tensors: Mapping[Port, Tensor]
    numbers: Mapping[str, int]
    matrices: Mapping[int, Tensor]


def run_in_one_launch(
    step: RecurrentSpecialization,
    staged: StagedStep,
    num_steps: int,
    reads: Mapping[Port, Rows],
    writes: Mapping[Port, Rows],
    matrices: Sequence[Tensor],
    lifted: Sequence[Tensor],
    lasting: frozenset[Port],
    *,
    backwards: bool,
    from_zero: bool,
) -> None:
    """Runs the parts of a step that are in the loop.

    Args:
        step, staged, num_steps, reads, writes, lifted, backwards: as for `StagedScan`.
        lasting: the values of which each step's is read when the loop is over.
        from_zero: whether all that is carried is zero before the first step.

    Raises:
        NotOneLaunchError: this loop does not run in one launch, and nothing has been launched.
    """
    device = step.device
    if os.environ.get("FLEXSN_ONE_LAUNCH", "1") == "0":
        raise NotOneLaunchError("FLEXSN_ONE_LAUNCH is 0")
    if num_steps < 2:
        raise NotOneLaunchError("there is one step")
    if torch.version.hip or (device.type != "cuda" and not triton_interpreted()):
        raise NotOneLaunchError("only CUDA launches programs that wait for each other")
    prepared = _prepared(step, staged, num_steps, reads, writes, matrices, lasting, backwards, from_zero)
    tensors = prepared.tensors(reads, writes)
    for i, port in enumerate(prepared.loop.carried):
        before, behind = reads[port], writes[port]
        start, end = (num_steps - 1, 0) if backwards else (0, num_steps - 1)
        tensors[Port(Role.STATE, i)] = before.memory[(before.first + start) % before.memory.shape[0]]
        tensors[Port(Role.FINAL_STATE, i)] = behind.memory[(behind.first + end) % behind.memory.shape[0]]
    for number in prepared.matrices:
        tensors[Port(Role.MATRIX, number)] = matrices[number]
    for i, (dtype, parts, columns) in enumerate(prepared.kernel.slots):
        shape = (2, parts, prepared.groups * prepared.tiles.rows, columns)
        tensors[Port(Role.OPERAND, i)] = torch.empty(shape, dtype=dtype, device=device)
    tensors |= _lifted(prepared.loop, lifted, device)
    tensors[Port(Role.COUNTER, 0)] = torch.zeros(prepared.groups * COUNTER_DISTANCE, dtype=torch.int32, device=device)
    tensors[Port(Role.COUNTER, 1)] = MARKS.on(device)
    passed = [tensors[port] for port in prepared.kernel.source.params]
    room = prepared.launch.resident(passed, prepared.numbers)
    at_once = min(prepared.groups, room // prepared.tiles.count)
    if at_once == 0:
        raise NotOneLaunchError(f"there is room for {room} programs at a time, and {prepared.tiles.count} share a row")
    MARKS.check(device)
    prepared.launch(passed, prepared.numbers, at_once * prepared.tiles.count)
    direction = "backward" if backwards else "forward"
    step.loops.told[direction] = _in_words(prepared.loop, prepared.tiles, prepared.groups, at_once)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A loop over values of one layout.

    Attributes:
        groups: of rows.
        numbers: the kernel's integers.
        matrices: the numbers of those that it takes.
        places: for each tensor that is loaded or stored at each step: its name in the kernel, the value that it is a
            view of, and where in memory it begins, counted from that of the value.
    """

    loop: Loop
    tiles: Tiles
    kernel: LoopKernel
    launch: CooperativeLaunch
    groups: int
    numbers: tuple[int, ...]
    matrices: tuple[int, ...]
    places: tuple[tuple[Port, Port, int], ...]

    def tensors(self, reads: Mapping[Port, Rows], writes: Mapping[Port, Rows]) -> dict[Port, Tensor]:
        """Those that are loaded or stored at each step: where they begin counts."""
        found = {}
        for name, port, offset in self.places:
            memory = (reads if name.role is Role.INPUT else writes)[port].memory
            found[name] = memory.as_strided((1,), (1,), memory.storage_offset() + offset)
        return found


def _prepared(
    step: RecurrentSpecialization,
    staged: StagedStep,
    num_steps: int,
    reads: Mapping[Port, Rows],
    writes: Mapping[Port, Rows],
    matrices: Sequence[Tensor],
    lasting: frozenset[Port],
    backwards: bool,
    from_zero: bool,
) -> _Prepared:
    loops = step.loops
    loop = loops.loop(staged, lasting)
    to_load, to_store = loops.memory(staged, lasting)
    rows = [reads[load.view.source] for load in to_load] + [writes[view.source] for view in to_store]
    layouts = [(r.first, r.memory.shape, r.memory.stride()) for r in rows]
    key = (id(staged), num_steps, lasting, from_zero, *layouts, *[m.stride() for m in matrices])
    found = loops.prepared.get(key)
    if found is None:
        tiles = tiles_for(loop, step.device, from_zero=from_zero)
        memory = _memory(loop, num_steps, reads, writes, matrices)
        kernel, launch = loops.kernel(step, staged, loop, memory, tiles, backwards=backwards, from_zero=from_zero)
        groups = -(-loop.num_rows // tiles.rows)
        if num_steps * tiles.count * (len(loop.exchanges) + 1) > _MOST_ARRIVALS:
            raise NotOneLaunchError("there are too many steps for one counter")
        named = {"T": num_steps, "B": loop.num_rows, **memory.numbers}
        numbers = tuple(named[size] for size in kernel.source.sizes)
        ports = [load.view.source for load in to_load] + [view.source for view in to_store]
        places = []
        for (name, tensor), port, r in zip(memory.tensors.items(), ports, rows, strict=True):
            if tensor.untyped_storage().data_ptr() != r.memory.untyped_storage().data_ptr():
                raise NotOneLaunchError(f"{port.name} is seen in an order that its memory does not have")
            places.append((name, port, int(tensor.storage_offset() - r.memory.storage_offset())))
        used = tuple(memory.matrices)
        found = _Prepared(loop, tiles, kernel, launch, groups, numbers, used, tuple(places))
        loops.prepared[key] = found
    return found


def _in_words(loop: Loop, tiles: Tiles, groups: int, at_once: int) -> str:
    turns = -(-groups // at_once)
    return (
        f"one launch for all steps, of {at_once * tiles.count} programs of {tiles.rows} rows x "
        f"{tiles.columns(loop.width)} columns, which keep their part of the matrices and exchange "
        f"{len(loop.exchanges)} value{'s' if len(loop.exchanges) > 1 else ''} a step"
        + (f"; {turns} turns of {at_once} groups of rows" if turns > 1 else "")
    )


def _memory(
    loop: Loop, num_steps: int, reads: Mapping[Port, Rows], writes: Mapping[Port, Rows], matrices: Sequence[Tensor]
) -> Memory:
    tensors: dict[Port, Tensor] = {}
    numbers: dict[str, int] = {}

    def place(port: Port, rows: Rows, shape: tuple[int, ...]) -> Place:
        sequence = rows.sequence
        missing = len(shape) + 1 - sequence.dim()  # of a value that broadcasts to the step
        memory = sequence[(slice(None), *(None,) * missing)].expand(num_steps, *shape)
        tensors[port] = memory
        try:
            row, column = two_strides(shape, memory.stride()[1:])
        except ValueError as error:
            raise NotOneLaunchError(f"a value has {error}") from None
        time = memory.stride(0)
        if column == 1 and time == loop.num_rows * row:
            return Place(row)
        numbers.update(
            {f"{port.name}_time": time, f"{port.name}_row": row, f"{port.name}_column": column}
        )
        return Place(None)

    to_load, to_store = memory_of(loop)
    loads = [
        (load, place(Port(Role.INPUT, i), reads[load.view.source].seen(load.view), load.shape))
        for i, load in enumerate(to_load)
    ]
    stores = []
    for i, view in enumerate(to_store):
        rows = writes[view.source].seen(view)
        stores.append((view, place(Port(Role.OUTPUT, i), rows, tuple(rows.memory.shape[1:]))))
    used = {number for part in loop.parts if isinstance(part, Multiply) for number in (part.matrix, part.added)}
    found = {number: matrices[number] for number in sorted(n for n in used if n is not None)}
    return Memory(tuple(loads), tuple(stores), tensors, numbers, found)


def _lifted(loop: Loop, lifted: Sequence[Tensor], device: torch.device) -> dict[Port, Tensor]:
    found = {}
    for part in loop.parts:
        if isinstance(part, Call):
            for i, layout in part.stage.graph.layouts.items():
                tensor = lifted[i].to(device).contiguous().resolve_neg()
                found[Port(Role.LIFTED, i)] = tensor.view(-1)[layout.offset :]
    return found

