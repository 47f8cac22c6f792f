"""The forward scan by speculation: each segment of time starts with a guess, which is checked and repaired."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexsn_codegen.scan._forward import ForwardTemplate, find_declared_inputs, load_counts
from flexsn_codegen.scan._spec import ForwardSpec
from flexsn_codegen.scan.segments._bounds import TOGETHER, at_least, at_most, define_bounds, divide_segment
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import Port, Role


def speculation_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that walks all segments in parallel. Each segment starts with a guess of the states before it.

    The guess is the result of a warm-up, which starts with the initial states and computes the ``"WARM"`` chunks before
    the segment. The kernel writes the results that `spec` specifies, except for final states. It also writes the states
    at the start and at the end of each segment. The repair does not compare guesses after the end of an element.

    Args:
        name: start of the kernel's name.
        core, spec: see `forward_source`.
    """
    return _Speculation(core, replace(spec, final_states=(False,) * len(spec.states))).write(name)


def repair_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that compares guesses with the true states, and recomputes segments whose guess is wrong.

    Afterwards, all results that `spec` specifies are bitwise equal to those of `forward_source`, except for states
    after the end of an element, which `ended_source` writes.

    Args:
        name: start of the kernel's name.
        core, spec: see `forward_source`.
    """
    return _Repair(core, spec).write(name)


def ended_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that copies each element's last states to all steps after its end.

    Args:
        name: start of the kernel's name.
        core, spec: see `forward_source`. `spec.ends` is True, and the scan writes sequences of states.
    """
    return _Ended(core, spec).write(name)


class SegmentsTemplate(ForwardTemplate):
    """Writes the lines that all kernels over segments share."""

    def _declare_seams(self) -> None:
        w, count = self._writer, len(self._spec.states)
        self._starts = [w.add(Role.SEGMENT_START, i) for i in range(count)]
        self._segment_ends = [w.add(Role.SEGMENT_END, i) for i in range(count)]

    def _declare_read(self) -> None:
        super()._declare_read()
        self._declare_ends()

    def _declare_ends(self) -> None:
        if self._counting:
            self._writer.bounds("least", "largest", list(self._counting.values()))

    def _walk(self) -> None:
        """Writes the walk of one segment from the states before it. The operands point to the segment's first step."""
        w, chunk, ends = self._writer, self._spec.chunk, self._spec.ends
        if self._counting:
            divide_segment(w, chunk, ends=ends)
            self._write_whole_chunks(chunk, "first", "whole")
            self._write_counted_chunks(chunk, "whole", "alive" if ends else "behind")
        else:
            self._write_whole_chunks(chunk, "first", "behind")
        if ends:
            w.integer("last", at_most(f"stop * {chunk}", "T"))
            self._write_after_ends(f"alive * {chunk}", "last")
        elif self._spec.rest and chunk > 1:
            with w.when("behind == chunks"):
                self._write_rest(chunk)

    def _warm_up(self, first: str, end: str) -> None:
        """Computes the chunks from `first` until `end` without storing results. Inputs point to chunk `first`."""
        w, chunk = self._writer, self._spec.chunk
        with w.loop("c", first, end, self._spec.stages):
            if self._counting:
                w.integer("begun", f"c * {chunk}")
            self._load_inputs(chunk, "begun" if self._counting else None)
            for k in range(chunk):
                self._write_columns(k)
                self._compute(k)
            for param in self._list_moving_inputs():
                w.move(param, chunk)

    def _write_columns(self, k: int) -> None:
        """Writes lines that a subclass adds before step `k` of a warm-up."""

    def _define_remaining(self, name: str, number: str) -> None:
        """Defines an int32 value that is above 0 for elements that have not ended before step `number`."""
        for n, count in enumerate(self._counting.values()):
            self._writer.less(f"{name}_{n}", count, number)
            self._writer.assign(name, f"{name}_{n}") if n == 0 else self._writer.choose(name, name, name, f"{name}_{n}")


class _Speculation(SegmentsTemplate):
    def write(self, name: str) -> KernelSource:
        w, chunk = self._writer, self._spec.chunk
        w.begin()
        w.segment()
        w.add_size("WARM")
        self._declare()
        self._declare_seams()
        w.integer("chunks", f"T // {chunk}")
        define_bounds(w, "segment")
        w.integer("from_chunk", "(first - WARM) * (first > WARM)")
        for param in self._list_moving_inputs():
            w.point(param, "from_chunk", chunk)
        warm_end = "first"
        if self._spec.ends:  # no warm-up is needed after all elements have ended
            warm_end = "warm"
            w.integer(warm_end, f"from_chunk + (largest > first * {chunk}) * (first - from_chunk)")
        self._warm_up("from_chunk", warm_end)
        self._store(self._starts)
        for param in self._list_moving():
            if param not in self._inputs.values():
                w.point(param, "first", chunk)
        self._walk()
        self._store(self._segment_ends)
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
        for i, param in enumerate(self._segment_ends):
            if self._spec.ends:
                w.load(f"last_{i}", param, w.row(param, "SEGMENTS", -1))
                self._define_remaining("left", self._find_first_step("(SEGMENTS - 1)"))
                w.choose(f"state_{i}", "left", f"last_{i}", f"state_{i}")
            else:
                w.load(f"state_{i}", param, w.row(param, "SEGMENTS", -1))
        w.any("wrong_anywhere", "wrong")
        with w.when("wrong_anywhere > 0"):
            self._repair()
        for i, param in self._finals.items():
            w.store(param, f"state_{i}")
        if self._spec.ends:
            for i in self._state_seqs:
                w.store(self._segment_ends[i], f"state_{i}", w.row(self._segment_ends[i], "SEGMENTS", -1))
        w.store(repairs, "repaired")
        doc = f"Repairs of a forward scan of segments, {chunk} steps a chunk. One program: BLOCK elements, all T."
        return w.finish(name, [self._core], doc)

    def _compare_all(self) -> None:
        """Counts in `wrong` the states whose guess differs from their value at the end of the previous segment."""
        w, ends = self._writer, self._spec.ends
        w.assign("wrong", w.zeros(torch.int32))
        for i, param in enumerate(self._segment_ends if ends else ()):
            w.load(f"state_{i}", param)
        with w.loop("n", "0", f"(SEGMENTS + {TOGETHER - 2}) // {TOGETHER}"):
            for u in range(TOGETHER):
                exists = f"n * {TOGETHER} + {u + 1} < SEGMENTS"
                for i, (start, end) in enumerate(zip(self._starts, self._segment_ends, strict=True)):
                    w.load(f"guess_{i}_{u}", start, w.row(start, f"n * {TOGETHER} + {u + 1}"), exists)
                    w.load(f"before_{i}_{u}", end, w.row(end, f"n * {TOGETHER} + {u}"), exists)
            for u in range(TOGETHER):
                if ends:  # updates the states of elements that have not ended before the previous segment
                    self._define_remaining("left", self._find_first_step(f"(n * {TOGETHER} + {u})"))
                    for i in range(len(self._segment_ends)):
                        w.choose(f"gone_on_{i}", "left", f"before_{i}_{u}", f"state_{i}")
                        w.select(f"state_{i}", f"n * {TOGETHER} + {u + 1} < SEGMENTS", f"gone_on_{i}", f"state_{i}")
                    self._define_remaining("left", self._find_first_step(f"(n * {TOGETHER} + {u + 1})"))
                for i, dtype in enumerate(self._spec.state_dtypes):
                    w.differ("differs", f"guess_{i}_{u}", f"before_{i}_{u}", dtype)
                    if ends:
                        w.choose("differs", "left", "differs", w.zeros(torch.int32))
                    w.assign("wrong", "wrong + differs")

    def _find_first_step(self, segment: str) -> str:
        """The first step of a segment. For the number after the last segment, this is the end of the last chunk."""
        return f"({segment} * chunks // SEGMENTS * {self._spec.chunk})"

    def _repair(self) -> None:
        """Writes the loop that repairs one segment after the other."""
        w, chunk = self._writer, self._spec.chunk
        for i, param in enumerate(self._segment_ends):
            w.load(f"state_{i}", param)
            w.assign(f"end_{i}", w.zeros(self._spec.state_dtypes[i]))
        with w.loop("segment", "1", "SEGMENTS"):
            w.assign("wrong", w.zeros(torch.int32))
            if self._spec.ends:
                self._define_remaining("left", self._find_first_step("segment"))
            for i, dtype in enumerate(self._spec.state_dtypes):
                w.load(f"guess_{i}", self._starts[i], w.row(self._starts[i], "segment"))
                w.load(f"end_{i}", self._segment_ends[i], w.row(self._segment_ends[i], "segment"))
                w.differ("differs", f"guess_{i}", f"state_{i}", dtype)
                if self._spec.ends:
                    w.choose("differs", "left", "differs", w.zeros(torch.int32))
                    w.choose(f"end_{i}", "left", f"end_{i}", f"state_{i}")
                w.assign("wrong", "wrong + differs")
            w.any("wrong_here", "wrong")
            with w.when("wrong_here > 0"):
                define_bounds(w, "segment")
                for param in self._list_moving():
                    w.point(param, "first", chunk)
                self._walk()
                for i in range(len(self._segment_ends)):
                    w.assign(f"end_{i}", f"state_{i}")
                w.assign("repaired", "repaired + 1")
            for i in range(len(self._segment_ends)):
                w.assign(f"state_{i}", f"end_{i}")


class _Ended(SegmentsTemplate):
    def write(self, name: str) -> KernelSource:
        w, chunk = self._writer, self._spec.chunk
        w.begin()
        w.segment()
        self._inputs = w.add_inputs(self._spec.inputs, find_declared_inputs(self._spec.inputs))
        self._counting = load_counts(w, self._spec.inputs, self._inputs)
        self._declare_ends()
        ends = {i: w.add(Role.SEGMENT_END, i) for i, is_written in enumerate(self._spec.state_seqs) if is_written}
        sequences = w.add_present(Role.STATE_SEQ, self._spec.state_seqs)
        for i, param in ends.items():
            w.load(f"state_{i}", param, w.row(param, "SEGMENTS", -1))
        w.integer("chunks", f"T // {chunk}")
        define_bounds(w, "segment")
        w.integer("from_step", at_least("least", f"first * {chunk}"))
        w.integer("last", f"behind * {chunk} + (behind == chunks) * (T - chunks * {chunk})")
        with w.loop("t", "from_step", "last"):
            self._define_remaining("left", "t")
            for i, param in sequences.items():
                w.load(f"kept_{i}", param, w.row(param, "t"))
                w.choose(f"kept_{i}", "left", f"kept_{i}", f"state_{i}")
                w.store(param, f"kept_{i}", w.row(param, "t"))
        doc = "States after the ends of elements. One program: BLOCK elements, one segment."
        return w.finish(name, [], doc)
