"""The forward scan by speculation: each segment of time begins with a guess, which is checked and repaired."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexsn_codegen.scan._forward import ForwardTemplate
from flexsn_codegen.scan._spec import ForwardSpec
from flexsn_codegen.scan.segments._bounds import TOGETHER, bounds
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import Port, Role


def speculation_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that walks all segments side by side, each from a guess.

    A segment's guess is the state after a warm-up of ``"WARM"`` chunks before it, from the initial state. The kernel
    writes what `spec` says but final states, and the states that each segment began and ended with.

    Args:
        name: start of the kernel's name.
        core, spec: as for `forward_source`.
    """
    return _Speculation(core, replace(spec, final_states=(False,) * len(spec.states))).write(name)


def repair_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that compares guesses with what they stand for, and computes again what began with others.

    Afterwards, all that `spec` says is written as `forward_source` would have, to the last bit.

    Args:
        name: start of the kernel's name.
        core, spec: as for `forward_source`.
    """
    return _Repair(core, spec).write(name)


class SegmentsTemplate(ForwardTemplate):
    """Common part of kernels that walk a segment."""

    def _declare_seams(self) -> None:
        w, count = self._writer, len(self._spec.states)
        self._starts = [w.add(Role.SEGMENT_START, i) for i in range(count)]
        self._ends_of = [w.add(Role.SEGMENT_END, i) for i in range(count)]

    def _walk(self) -> None:
        """One segment, from the states before it; the operands point to its first step."""
        chunk = self._spec.chunk
        self._whole_chunks(chunk, "first", "behind")
        if self._spec.rest and chunk > 1:
            with self._writer.when("behind == chunks"):
                self._rest(chunk)


class _Speculation(SegmentsTemplate):
    def write(self, name: str) -> KernelSource:
        w, chunk = self._writer, self._spec.chunk
        w.begin()
        w.segment()
        w.add_size("WARM")
        self._declare()
        self._declare_seams()
        w.integer("chunks", f"T // {chunk}")
        bounds(w, "segment")
        w.integer("from_chunk", "(first - WARM) * (first > WARM)")
        for param in self._inputs.values():
            w.point(param, "from_chunk", chunk)
        with w.loop("c", "from_chunk", "first", self._spec.stages):
            self._load_inputs(chunk)
            for k in range(chunk):
                self._compute(k)
            for param in self._inputs.values():
                w.move(param, chunk)
        self._store(self._starts)
        for param in self._moving():
            if param not in self._inputs.values():
                w.point(param, "first", chunk)
        self._walk()
        self._store(self._ends_of)
        doc = f"Forward scan of segments from guesses, {chunk} steps a chunk. One program: BLOCK elements, one segment."
        return w.finish(name, [self._core], doc)

    def _store(self, seams: list[Port]) -> None:
        for i, param in enumerate(seams):
            self._writer.store(param, f"state_{i}", self._writer.row(param, "segment"))


class _Repair(SegmentsTemplate):
    def write(self, name: str) -> KernelSource:
        w, chunk = self._writer, self._spec.chunk
        w.begin()
        w.add_segments()
        self._declare_read()
        self._declare_seams()
        self._declare_written()
        (repairs,) = w.add_present(Role.SEGMENT_REPAIRS, [True], [True]).values()
        w.integer("chunks", f"T // {chunk}")
        w.assign("repaired", w.zeros(torch.int32))
        self._compare_all()
        for i, param in enumerate(self._ends_of):
            w.load(f"state_{i}", param, w.row(param, "SEGMENTS", -1))
        w.any("wrong_anywhere", "wrong")
        with w.when("wrong_anywhere > 0"):
            self._repair()
        for i, param in self._finals.items():
            w.store(param, f"state_{i}")
        w.store(repairs, "repaired")
        doc = f"Repairs of a forward scan of segments, {chunk} steps a chunk. One program: BLOCK elements, all T."
        return w.finish(name, [self._core], doc)

    def _compare_all(self) -> None:
        """Counts guesses that differ in `wrong`; 0: each segment began with the end of the one before it."""
        w = self._writer
        w.assign("wrong", w.zeros(torch.int32))
        with w.loop("n", "0", f"(SEGMENTS + {TOGETHER - 2}) // {TOGETHER}"):
            for u in range(TOGETHER):
                exists = f"n * {TOGETHER} + {u + 1} < SEGMENTS"
                for i, (start, end) in enumerate(zip(self._starts, self._ends_of, strict=True)):
                    w.load(f"guess_{i}_{u}", start, w.row(start, f"n * {TOGETHER} + {u + 1}"), exists)
                    w.load(f"before_{i}_{u}", end, w.row(end, f"n * {TOGETHER} + {u}"), exists)
            for u in range(TOGETHER):
                for i, dtype in enumerate(self._spec.state_dtypes):
                    w.differ("differs", f"guess_{i}_{u}", f"before_{i}_{u}", dtype)
                    w.assign("wrong", "wrong + differs")

    def _repair(self) -> None:
        """One segment after the other."""
        w, chunk = self._writer, self._spec.chunk
        for i, param in enumerate(self._ends_of):
            w.load(f"state_{i}", param)
            w.assign(f"end_{i}", w.zeros(self._spec.state_dtypes[i]))
        with w.loop("segment", "1", "SEGMENTS"):
            w.assign("wrong", w.zeros(torch.int32))
            for i, dtype in enumerate(self._spec.state_dtypes):
                w.load(f"guess_{i}", self._starts[i], w.row(self._starts[i], "segment"))
                w.load(f"end_{i}", self._ends_of[i], w.row(self._ends_of[i], "segment"))
                w.differ("differs", f"guess_{i}", f"state_{i}", dtype)
                w.assign("wrong", "wrong + differs")
            w.any("wrong_here", "wrong")
            with w.when("wrong_here > 0"):
                bounds(w, "segment")
                for param in self._moving():
                    w.point(param, "first", chunk)
                self._walk()
                for i in range(len(self._ends_of)):
                    w.assign(f"end_{i}", f"state_{i}")
                w.assign("repaired", "repaired + 1")
            for i in range(len(self._ends_of)):
                w.assign(f"state_{i}", f"end_{i}")
