"""The backward scan by composition: each segment of time is an affine map of the cotangents at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexsn_codegen.scan._backward import BackwardTemplate
from flexsn_codegen.scan._spec import BackwardSpec
from flexsn_codegen.scan.segments._bounds import TOGETHER, at_most, define_bounds, divide_segment
from flexsn_codegen.scan.segments._maps import SegmentMaps
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import Port, Role


@dataclass(frozen=True, slots=True)
class Columns:
    """The VJP of a step whose outputs have no cotangents.

    Attributes:
        vjp: `[inputs, states, lifted, *saved, *states' cotangents] -> [*states' gradients]`. `None` if all gradients of
            states are zero.
        gradients: for each state, the position of its gradient among the results, or `None` if the gradient is zero.
    """

    vjp: CoreSource | None
    gradients: tuple[int | None, ...]


def maps_source(
    name: str, core: CoreSource | None, vjp: CoreSource, columns: Columns, spec: BackwardSpec
) -> KernelSource:
    """Writes the kernel that computes the maps (`SegmentMaps`) of all segments except for the first one.

    A map leads from the cotangents at the end of a segment to those at its start. A map includes the states whose
    gradients are carried from step to step. The last segment starts with gradients of final states instead of zeros.

    Args:
        name: start of the kernel's name.
        core, vjp, spec: see `backward_source`. `always` is True for all flags in `spec.flags`.
        columns: the part of the VJP that is linear in the cotangents of states.
    """
    return _Maps(core, vjp, spec, columns).write(name)


def carried_source(name: str, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec) -> KernelSource:
    """Writes the kernel that combines the maps into the cotangents at the end of each segment except for the last one.

    A map may give a cotangent that is infinite or NaN, for example the product of an infinite derivative and zero. The
    segment is then walked step by step, as in the serial kernel.

    Args:
        name: start of the kernel's name.
        core, vjp, spec: see `maps_source`.
    """
    return _Carried(core, vjp, spec).write(name)


def gradient_source(name: str, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec) -> KernelSource:
    """Writes the kernel that computes all gradients, and walks all segments in parallel.

    Gradients of lifted tensors have the shape `[segments, ...]`, and are summed after the kernel.

    Args:
        name: start of the kernel's name.
        core, vjp, spec: see `maps_source`.
    """
    return _Gradient(core, vjp, spec).write(name)


def map_size(spec: BackwardSpec) -> int:
    """The number of states whose gradients are carried from step to step."""
    return len(_list_carrying(spec))


def _list_carrying(spec: BackwardSpec) -> list[int]:
    first = len(spec.inputs)
    gradients = spec.gradients[first : first + len(spec.states)]
    return [i for i, position in enumerate(gradients) if position is not None]


class _Segments(BackwardTemplate):
    _end = "behind"
    _count = "behind - first"

    def __init__(self, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec) -> None:
        super().__init__(core, vjp, spec)
        self._carrying = _list_carrying(spec)

    def _limit_rest(self, condition: str) -> str:
        return f"({condition}) & (behind == chunks)"

    def _begin(self) -> None:
        w = self._writer
        self._numbers = {core.name: w.add_numbers(core) for core in self._cores}
        self._declare_inputs()
        if self._counting:
            self._writer.bounds("least", "largest", list(self._counting.values()))
        self._declare_lifted()

    def _walk(self) -> None:
        if not self._counting:
            super()._walk()
            return
        w, chunk, ends = self._writer, self._spec.chunk, self._spec.ends
        divide_segment(w, chunk, ends=ends)
        if ends:
            w.integer("last", at_most(f"stop * {chunk}", "T"))
            self._skip(f"alive * {chunk}", "last")
        w.integer("count", "whole - first")
        self._write_counted_chunks("alive", "count")

    def _declare_flags(self) -> None:
        """Sets the flags. At the end of each segment except for the last one, all flags are True."""
        w = self._writer
        for flag in self._spec.flags:
            name = f"came_state_{flag.state}"
            w.select(name, "behind == chunks", w.flag(flag.given), w.flag(True), flag=True)

    def _declare_no_results(self) -> None:
        self._grad_inputs: dict[int, Port] = {}
        self._grad_states: dict[int, Port] = {}
        self._grad_lifted: dict[int, Port] = {}


class _Maps(_Segments):
    def __init__(self, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec, columns: Columns) -> None:
        super().__init__(core, vjp, spec)
        self._columns = columns
        if columns.vjp is not None and columns.vjp.name != vjp.name:
            self._cores = [*self._cores, columns.vjp]
            self._used |= frozenset(columns.vjp.arguments)

    def write(self, name: str) -> KernelSource:
        w, spec = self._writer, self._spec
        w.begin()
        w.segment(1)
        self._begin()
        self._declare_read()
        w.integer("chunks", f"T // {spec.chunk}")
        define_bounds(w, "segment")
        self._declare_carried()
        self._declare_no_results()
        maps = SegmentMaps(w, "grad_state", self._carrying)
        maps.begin(spec.state_dtypes)
        self._walk()
        maps.store()
        doc = f"Backward maps of segments, {spec.chunk} steps a chunk. One program: BLOCK elements, one segment."
        return w.finish(name, self._cores, doc)

    def _declare_carried(self) -> None:
        super()._declare_carried()
        self._declare_flags()
        for i, dtype in enumerate(self._spec.state_dtypes):
            if self._spec.grad_final_states[i]:
                self._writer.select(f"grad_state_{i}", "behind == chunks", f"grad_state_{i}", self._writer.zeros(dtype))

    def _walk_back(self, k: int, partial: bool) -> None:
        super()._walk_back(k, partial)
        w, spec, vjp = self._writer, self._spec, self._columns.vjp
        for j in self._carrying:
            results = [f"column_result_{i}" for i in range(0 if vjp is None else len(vjp.results))]
            if vjp is not None:
                replacements = {
                    Port(Role.GRAD_STATE, i): f"column_{j}_{i}" if i in self._carrying else w.zeros(dtype)
                    for i, dtype in enumerate(spec.state_dtypes)
                }
                self._call(results, vjp, k, replacements)
            for i in self._carrying:
                position = self._columns.gradients[i]
                value = w.zeros(spec.state_dtypes[i]) if position is None else results[position]
                self._update(f"column_{j}_{i}", value, self._exists(k, partial))


class _Carried(_Segments):
    def write(self, name: str) -> KernelSource:
        w, spec, count = self._writer, self._spec, len(self._carrying)
        w.begin()
        w.add_segments()
        self._begin()
        self._declare_read()
        self._declare_no_results()
        self._maps = SegmentMaps(w, "grad_state", self._carrying)
        self._carried = [w.add(Role.SEGMENT_CARRIED, a) for a in range(count)]
        for i, dtype in enumerate(spec.state_dtypes):
            if i not in self._carrying:
                w.assign(f"grad_state_{i}", w.zeros(dtype))
        for flag in spec.flags:
            w.assign(f"came_state_{flag.state}", w.flag(True), flag=True)
        w.integer("chunks", f"T // {spec.chunk}")
        w.assign("beyond", w.zeros(torch.int32))
        for i in self._carrying:
            w.assign(f"next_{i}", w.zeros(spec.state_dtypes[i]))
        self._maps.load_rest("SEGMENTS", -1)  # the cotangents at the end of the second-to-last segment
        self._store("SEGMENTS", 2)
        with w.loop("n", "0", f"(SEGMENTS + {TOGETHER - 3}) // {TOGETHER}"):
            self._combine_together()
        w.any("beyond_anywhere", "beyond")
        with w.when("beyond_anywhere > 0"):
            self._maps.load_rest("SEGMENTS", -1)
            self._combine_one_by_one()
        doc = f"Cotangents that come to segments, {spec.chunk} steps a chunk. One program: BLOCK elements, all T."
        return w.finish(name, self._cores, doc)

    def _store(self, number: str, shift: int, exists: str | None = None) -> None:
        w = self._writer
        for a, i in enumerate(self._carrying):
            param = self._carried[a]
            w.store(param, f"grad_state_{i}", w.row(param, number, -shift), exists)

    def _combine_together(self) -> None:
        w = self._writer
        for u in range(TOGETHER):
            self._maps.load(u, f"SEGMENTS - n * {TOGETHER}", -(u + 2), self._is_inner(u))
        for u in range(TOGETHER):
            self._maps.combine(u)
            self._maps.advance(self._is_inner(u))
            for i in self._carrying:
                w.not_finite("is_beyond", f"grad_state_{i}")
                w.assign("beyond", "beyond + is_beyond")
            self._store(f"SEGMENTS - n * {TOGETHER}", u + 3, self._is_inner(u))

    @staticmethod
    def _is_inner(u: int) -> str:
        """The condition under which map `u` of a round belongs to a segment between the first and the last segment."""
        return f"n * {TOGETHER} + {u + 2} < SEGMENTS"

    def _combine_one_by_one(self) -> None:
        w = self._writer
        with w.loop("n", "2", "SEGMENTS"):
            w.integer("segment", "SEGMENTS - n")
            self._maps.load(0, "segment")
            self._maps.combine(0)
            w.assign("beyond", w.zeros(torch.int32))
            for i in self._carrying:
                w.not_finite("is_beyond", f"next_{i}")
                w.assign("beyond", "beyond + is_beyond")
            w.any("beyond_here", "beyond")
            with w.when("beyond_here > 0"):
                define_bounds(w, "segment")
                self._walk()
                for i in self._carrying:
                    w.assign(f"next_{i}", f"grad_state_{i}")
            for i in self._carrying:
                w.assign(f"grad_state_{i}", f"next_{i}")
            self._store("segment", 1)


class _Gradient(_Segments):
    def write(self, name: str) -> KernelSource:
        w, spec = self._writer, self._spec
        w.begin()
        w.segment()
        self._begin()
        w.integer("chunks", f"T // {spec.chunk}")
        define_bounds(w, "segment")
        carried = [w.add(Role.SEGMENT_CARRIED, a) for a in range(len(self._carrying))]
        for a, i in enumerate(self._carrying):
            w.load(f"carried_{i}", carried[a], w.row(carried[a], "segment"), "behind < chunks")
        self._declare_others()
        self._declare_grad_lifted()
        self._walk()
        for i, param in self._grad_states.items():
            w.store(param, f"grad_state_{i}", exists="segment == 0")
        for i, param in self._grad_lifted.items():
            w.store(param, f"grad_lifted_{i}", w.row(param, "segment"))
        doc = f"Backward scan of segments, {spec.chunk} steps a chunk. One program: BLOCK elements, one segment."
        return w.finish(name, self._cores, doc)

    def _declare_carried(self) -> None:
        super()._declare_carried()
        self._declare_flags()
        w = self._writer
        for i, dtype in enumerate(self._spec.state_dtypes):
            cotangent = f"carried_{i}" if i in self._carrying else w.zeros(dtype)
            w.select(f"grad_state_{i}", "behind == chunks", f"grad_state_{i}", cotangent)
