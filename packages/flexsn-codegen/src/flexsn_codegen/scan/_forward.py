"""The forward scan: one program walks `BLOCK` elements through time, with their states in registers.

For each chunk of `K` steps, a program issues the loads of all `K` steps, and then computes and stores one step after
the other. The compiler would not move loads before earlier stores, because a store may write to the memory that a load
reads. With several stages, the loads of later chunks are in flight while one chunk is computed. The steps after the
last complete chunk are computed one by one.

For an input with delays, the kernel loads the step that is earlier by the integer part of the delay. This step differs
between the elements of a program, so each element is loaded from its own row.

An input that counts down (the lengths of sequences) is one number for each element, which is loaded once. In chunks in
which all of these numbers are above 0, they are treated as constants, so that the compiler eliminates code that depends
on them. If steps have ends (`ForwardSpec.ends`), a program computes steps until the last of its elements ends. Later
outputs are zeros, which are stored and not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexsn_codegen.scan._spec import ForwardSpec
from flexsn_codegen.source._source import CoreSource, InputLayout, KernelSource, Late
from flexsn_codegen.targets._base import KernelWriter
from flexsn_graph import Port, Role


def forward_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the forward kernel of a step.

    Args:
        name: start of the kernel's name.
        core: the step, `[inputs, states, lifted] -> [*outputs, *new_states, *saved]`. Unused arguments may be missing.
        spec: the tensors that are read and written, and their layouts.
    """
    template = SkewedForward if find_only_late(spec.inputs) is not None and spec.segment else ForwardTemplate
    return template(core, spec).write(name)


def find_declared_inputs(layouts: Sequence[InputLayout]) -> frozenset[Port]:
    """Inputs that kernels need even if the step does not read them: inputs that count down, delays, delayed inputs."""
    return frozenset(
        Port(Role.INPUT, i) for i, layout in enumerate(layouts) if layout.counts_down or layout.once or layout.late
    )


def find_only_late(layouts: Sequence[InputLayout]) -> tuple[int, Late] | None:
    """The index and the delays of the only late input. `None` if several inputs are late, or an input counts down."""
    late_inputs = [(i, layout.late) for i, layout in enumerate(layouts) if layout.late is not None]
    if len(late_inputs) != 1 or any(layout.counts_down for layout in layouts):
        return None
    return late_inputs[0]


def count_added_rows(delays: Late, segment: int) -> int:
    """The number of additional rows that checkpoints need, because delays shift segments. See `SkewedForward`."""
    return -(-delays.most // segment)


def load_counts(w: KernelWriter, layouts: Sequence[InputLayout], inputs: Mapping[int, Port]) -> dict[int, str]:
    """Loads the inputs that count down, for the first step. Returns the names of the values, by index of the input."""
    names = {i: f"count_{i}" for i in inputs if layouts[i].counts_down}
    for i, name in names.items():
        w.load(name, inputs[i])
    return names


def load_delays(w: KernelWriter, layouts: Sequence[InputLayout], inputs: Mapping[int, Port]) -> dict[int, str]:
    """Loads delays and shifts late inputs. Returns the names of the delays' integer parts, by index of the input."""
    names = {}
    for i, port in inputs.items():
        late = layouts[i].late
        if late is not None:
            w.load(f"delay_{i}", inputs[late.by])
            w.whole_steps(f"late_{i}", f"delay_{i}", late.most)
            w.shift(port, f"late_{i}")
            names[i] = f"late_{i}"
    return names


def conjoin(*conditions: str | None) -> str | None:
    """The conjunction of conditions. `None` is a condition that always holds."""
    present = [condition for condition in conditions if condition]
    if len(present) > 1:
        present = [f"({condition})" for condition in present]
    return " & ".join(present) or None


def assign_count(w: KernelWriter, name: str, first: str, step: str | None) -> None:
    """Assigns the value of an input that counts down, at one step, to a name.

    Args:
        first: the value at the first step.
        step: number of the step, as a scalar. `None` if the value at the step is above 0 for all elements.
    """
    if step is None:
        w.assign(name, f"{w.zeros(torch.int32)} + 1")
    else:
        w.less(name, first, step)


class ForwardTemplate:
    """Writes the lines of a forward kernel. Subclasses write some of the lines differently."""

    def __init__(self, core: CoreSource, spec: ForwardSpec) -> None:
        self._core = core
        self._spec = spec
        self._writer = core.target.writer(spec.strided)
        self._used = frozenset(core.arguments)
        self._first = "0"  # number of the step to which the operands point, as a scalar
        self._inputs_have_begun = False  # True in steps in which all inputs with delays have begun

    def write(self, name: str) -> KernelSource:
        w, spec, chunk = self._writer, self._spec, self._spec.chunk
        w.begin()
        self._declare()
        for param in self._list_moving():
            w.point(param)
        if self._counting:
            self._walk_lengths(chunk)
        elif spec.single:
            self._walk_once(chunk)
        else:
            w.integer("chunks", f"T // {chunk}")
            if self._late:
                self._write_late_chunks(chunk)
            else:
                self._write_whole_chunks(chunk)
            if spec.rest and chunk > 1:
                self._write_rest(chunk)
        for i, param in self._finals.items():
            w.store(param, f"state_{i}")
        return w.finish(name, [self._core], f"Forward scan, {chunk} steps a chunk. One program: BLOCK elements, all T.")

    def _write_late_chunks(self, chunk: int) -> None:
        """Writes a loop over the chunks in which late inputs may not have begun, and a loop over the other chunks."""
        longest = max(layout.late.most for layout in self._spec.inputs if layout.late is not None)
        lead = -(-longest // chunk)
        self._writer.integer("lead", f"chunks - (chunks - {lead}) * (chunks > {lead})")
        self._write_whole_chunks(chunk, "0", "lead")
        self._inputs_have_begun = True
        self._write_whole_chunks(chunk, "lead", "chunks")
        self._inputs_have_begun = False

    def _write_whole_chunks(self, chunk: int, first: str = "0", end: str = "chunks") -> None:
        segment = self._spec.segment
        self._load_early(0, f"{first} < {end}")
        with self._writer.loop("c", first, end, self._spec.stages):
            self._first = f"c * {chunk}"
            self._load_inputs(chunk, early=True)
            self._load_early(chunk, f"c + 1 < {end}")
            for k in range(chunk):
                if self._checkpoints and k % segment == 0:
                    row = f"c * {chunk // segment} + {k // segment - 1}"
                    self._write_checkpoints(row, None if k else "c > 0")
                self._write_step(k)
            self._move(chunk)

    def _walk_once(self, chunk: int) -> None:
        """Writes all steps of a sequence that is one chunk."""
        segment = self._spec.segment
        self._load_inputs(chunk)
        for k in range(chunk):
            if self._checkpoints and k and k % segment == 0:
                self._write_checkpoints(str(k // segment - 1), None)
            self._write_step(k)

    def _walk_lengths(self, chunk: int) -> None:
        """Writes all steps if the step function has inputs that count down."""
        w = self._writer
        w.bounds("least", "largest", list(self._counting.values()))
        w.integer("chunks", f"least // {chunk}")
        self._write_whole_chunks(chunk)
        ends = self._spec.ends
        w.integer("behind", f"(largest + {chunk - 1}) // {chunk}" if ends else f"T // {chunk}")
        self._write_counted_chunks(chunk, "chunks", "behind")
        if ends:
            self._write_after_ends(f"behind * {chunk}", "T")
        elif self._spec.rest and chunk > 1:
            self._write_rest(chunk, "behind")

    def _write_counted_chunks(self, chunk: int, first: str, end: str) -> None:
        """Writes chunks in which elements may have ended. If steps have ends, the last chunk may reach beyond T."""
        w, segment, ends = self._writer, self._spec.segment, self._spec.ends
        with w.loop("c", first, end):
            w.integer("begun", f"c * {chunk}")
            self._first = "begun"
            exists = [f"begun + {k} < T" if ends else None for k in range(chunk)]
            self._load_inputs(chunk, "begun", exists)
            for k in range(chunk):
                if self._checkpoints and k % segment == 0:
                    row = f"c * {chunk // segment} + {k // segment - 1}"
                    self._write_checkpoints(row, conjoin(None if k else "c > 0", exists[k]))
                self._write_step(k, exists[k])
            self._move(chunk)

    def _write_after_ends(self, first: str, end: str) -> None:
        """Writes the steps after all elements have ended. Outputs are zeros, and states stay the same."""
        w = self._writer
        with w.loop("t", first, end):
            w.assign("ended", w.zeros(torch.float32))
            for param in self._outputs.values():
                w.store(param, "ended", w.at(param))
            for i, param in self._state_seqs.items():
                w.store(param, f"state_{i}", w.at(param))
            for param in self._bits.values():
                w.store_bits(param, "ended", w.at(param))
            for param in (*self._outputs.values(), *self._state_seqs.values(), *self._bits.values()):
                w.move(param, 1)

    def _write_rest(self, chunk: int, chunks: str = "chunks") -> None:
        segment = self._spec.segment
        with self._writer.loop("t", f"{chunks} * {chunk}", "T", self._spec.stages):
            self._first = "t"
            self._load_inputs(1, "t")
            if self._checkpoints:
                self._write_checkpoints(f"t // {segment} - 1", f"(t > 0) & (t % {segment} == 0)")
            self._write_step(0)
            self._move(1)

    def _declare(self) -> None:
        self._declare_read()
        self._declare_written()

    def _declare_read(self) -> None:
        w, spec = self._writer, self._spec
        self._numbers = w.add_numbers(self._core)
        self._inputs = w.add_inputs(spec.inputs, self._used | find_declared_inputs(spec.inputs))
        self._counting = load_counts(w, spec.inputs, self._inputs)
        self._late = load_delays(w, spec.inputs, self._inputs)
        lifted = w.add_lifted(spec.lifted, self._used, spec.lifted_like)
        states = {i: w.add(Role.STATE, i, layout) for i, layout in enumerate(spec.states) if layout is not None}
        for i, dtype in enumerate(spec.state_dtypes):
            if i in states:
                w.load(f"state_{i}", states[i])
            else:
                w.assign(f"state_{i}", w.zeros(dtype))
        for i, param in lifted.items():
            w.load(f"lifted_{i}", param)
        self._numbers += w.add_once(self._core, self._numbers)

    def _declare_written(self) -> None:
        w, spec = self._writer, self._spec
        self._outputs = w.add_present(Role.OUTPUT, spec.outputs)
        self._state_seqs = w.add_present(Role.STATE_SEQ, spec.state_seqs)
        self._saved = w.add_present(Role.SAVED, [True] * spec.saved)
        self._finals = w.add_present(Role.FINAL_STATE, spec.final_states)
        self._bits = w.add_bits(spec.bits)
        reloaded = dict(spec.follows)
        has_checkpoints = spec.segment and not (spec.single and spec.chunk <= spec.segment)
        stored = [i for i in range(len(spec.states)) if i not in reloaded] if has_checkpoints else []
        self._checkpoints = {i: w.add(Role.CHECKPOINT, i) for i in stored}

    def _list_moving_inputs(self) -> list[Port]:
        layouts = self._spec.inputs
        return [param for i, param in self._inputs.items() if i not in self._counting and not layouts[i].once]

    def _list_moving(self) -> list[Port]:
        return [
            *self._list_moving_inputs(),
            *self._outputs.values(),
            *self._state_seqs.values(),
            *self._saved.values(),
            *self._bits.values(),
        ]

    def _load_early(self, shift: int, exists: str) -> None:
        """Loads the `early` inputs of the chunk `shift` steps after the operands' current step, if `exists` holds."""
        w, layouts = self._writer, self._spec.inputs
        for k in range(self._spec.chunk):
            for i, param in self._inputs.items():
                if layouts[i].early:
                    w.load(f"early_{i}_{k}", param, w.at(param, shift + k), exists)

    def _load_inputs(
        self, steps: int, begun: str | None = None, exists: Sequence[str | None] = (), *, early: bool = False
    ) -> None:
        """Loads the inputs of `steps` steps.

        Args:
            begun: number of the first step, as a scalar. `None` if all counts are above 0 in these steps.
            exists: for each step, the condition under which it exists. By default, all steps exist.
            early: True if `early` inputs have already been loaded, one chunk earlier.
        """
        w = self._writer
        for k in range(steps):
            for i, param in self._inputs.items():
                if self._spec.inputs[i].once:
                    continue
                if i in self._counting:
                    assign_count(w, f"input_{i}_{k}", self._counting[i], None if begun is None else f"{begun} + {k}")
                elif early and self._spec.inputs[i].early:
                    w.assign(f"input_{i}_{k}", f"early_{i}_{k}")
                else:
                    late = None if self._inputs_have_begun else self._late.get(i)
                    begins = None if late is None else f"{self._first} + {k} >= {late}"
                    w.load(f"input_{i}_{k}", param, w.at(param, k), conjoin(begins, exists[k] if exists else None))

    def _write_checkpoints(self, row: str, begins: str | None) -> None:
        """Writes the states to a row of the checkpoints if the condition `begins` holds.

        The states before segment `j` belong to row `j - 1`.
        """
        w = self._writer
        for i, param in self._checkpoints.items():
            w.store(param, f"state_{i}", w.row(param, row), begins)

    def _compute(self, k: int) -> None:
        """Computes one step without writing its results."""
        results = [port.name for port in self._core.results]
        arguments = [f"{a.name}_{k}" if a.role is Role.INPUT else a.name for a in self._core.arguments]
        self._writer.call(results, self._core, [*arguments, *self._numbers])

    def _write_step(self, k: int, exists: str | None = None) -> None:
        w = self._writer
        self._compute(k)
        for i, param in self._outputs.items():
            w.store(param, f"output_{i}", w.at(param, k), exists)
        for i, param in self._state_seqs.items():
            w.store(param, f"state_{i}", w.at(param, k), exists)
        for i, param in self._saved.items():
            w.store(param, f"saved_{i}", w.at(param, k), exists)
        for i, param in self._bits.items():
            w.store_bits(param, f"output_{i}", w.at(param, k), exists)

    def _move(self, steps: int) -> None:
        for param in self._list_moving():
            self._writer.move(param, steps)


class SkewedForward(ForwardTemplate):
    """The forward for a `SkewedBackward`. Each element's segments start later by the integer part of its delay.

    Segment `j` of an element starts at step `j * segment + delay`, where `j` may be negative. Row
    `j - 1 + count_added_rows(...)` of the checkpoints contains the states before this step. For each element, every
    `segment` consecutive steps contain exactly one step at which a segment starts.
    """

    def _declare_written(self) -> None:
        super()._declare_written()
        w, segment = self._writer, self._spec.segment
        late_input = find_only_late(self._spec.inputs)
        assert late_input is not None
        number, delays = late_input
        self._rows = count_added_rows(delays, segment)
        w.assign("phase", f"{self._late[number]} % {segment}")
        w.assign("segments_late", f"{self._late[number]} // {segment}")
        for param in self._checkpoints.values():
            w.shift(param, "segments_late")

    def _write_whole_chunks(self, chunk: int, first: str = "0", end: str = "chunks") -> None:
        w, segment = self._writer, self._spec.segment
        with w.loop("c", first, end):
            self._first = f"c * {chunk}"
            self._load_inputs(chunk)
            for k in range(chunk):
                for i in self._checkpoints:
                    if k % segment:
                        w.select(f"kept_{i}", f"phase == {k % segment}", f"state_{i}", f"kept_{i}")
                    else:
                        w.assign(f"kept_{i}", f"state_{i}")
                self._write_step(k)
                if k % segment == segment - 1:
                    number = f"c * {chunk // segment} + {k // segment}"
                    for i, param in self._checkpoints.items():
                        row = w.row(param, f"{number} + {self._rows - 1}")
                        w.store(param, f"kept_{i}", row, f"({number} > 0) | (phase > 0)")
            self._move(chunk)

    def _write_rest(self, chunk: int, chunks: str = "chunks") -> None:
        w, segment = self._writer, self._spec.segment
        with w.loop("t", f"{chunks} * {chunk}", "T"):
            self._first = "t"
            self._load_inputs(1, "t")
            for i, param in self._checkpoints.items():
                row = w.row(param, f"t // {segment} + {self._rows - 1}")
                w.store(param, f"state_{i}", row, f"(t > 0) & (t % {segment} == phase)")
            self._write_step(0)
            self._move(1)
