"""The backward scan: from the last step to the first, with the gradients of states in registers.

By default, states are recomputed. For each chunk of `K` steps, from the last chunk to the first, the kernel loads the
states before the chunk and the chunk's inputs, recomputes the chunk's states, and then computes the VJP of each step,
from the last step to the first. The steps after the last complete chunk are a shorter chunk or, on targets on which
masks are faster than branches, a chunk whose last steps are masked. Gradients pass through masked steps unchanged. If
the forward has written residuals, the VJP takes them instead of the states, and nothing is recomputed.

The gradient of an input with delays is written to the steps from which the forward has loaded the input. The last steps
of this input, which no step reads, have zero gradients.

If steps have ends, a program starts at the step at which the last of its elements ends, because the forward stops at
this step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from flexsn_codegen.scan._forward import (
    assign_count,
    conjoin,
    count_added_rows,
    find_declared_inputs,
    find_only_late,
    load_counts,
    load_delays,
)
from flexsn_codegen.scan._spec import BackwardSpec
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import Port, Role

_NO_REPLACEMENTS: Mapping[Port, str] = MappingProxyType({})


def backward_source(name: str, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec) -> KernelSource:
    """Writes the backward kernel of a step.

    Args:
        name: start of the kernel's name.
        core: the step, which recomputes states if the VJP takes states. `None` if the forward has written residuals.
        vjp: `[inputs, states, lifted, *saved, *cotangents] -> [*gradients]`.
        spec: the tensors that are read and written, and their layouts.
    """
    template = SkewedBackward if find_only_late(spec.inputs) is not None else BackwardTemplate
    return template(core, vjp, spec).write(name)


class BackwardTemplate:
    """Writes the lines of a backward kernel. Subclasses write some of the lines differently."""

    def __init__(self, core: CoreSource | None, vjp: CoreSource, spec: BackwardSpec) -> None:
        self._vjp = vjp
        self._spec = spec
        self._writer = vjp.target.writer(spec.strided)
        self._num_states = len(spec.states)
        takes_states = any(port.role is Role.STATE for port in vjp.arguments)
        self._core = core if takes_states else None
        self._cores = [vjp] if self._core is None else [self._core, vjp]
        self._used = frozenset((*vjp.arguments, *(self._core.arguments if self._core else ())))
        first_lifted = len(spec.inputs) + self._num_states
        self._input_gradients = spec.gradients[: len(spec.inputs)]
        self._state_gradients = spec.gradients[len(spec.inputs) : first_lifted]
        self._lifted_gradients = spec.gradients[first_lifted:]

    def write(self, name: str) -> KernelSource:
        w, spec = self._writer, self._spec
        w.begin()
        self._numbers = {core.name: w.add_numbers(core) for core in self._cores}
        if spec.rows:
            self._declare_lifted()
            self._declare_grad_lifted()
            with w.rows():
                self._declare_inputs()
                self._declare_others()
                self._write_walk()
        else:
            self._declare_inputs()
            self._declare_lifted()
            self._declare_others()
            self._declare_grad_lifted()
            self._write_walk()
        for i, param in self._grad_lifted.items():
            w.store(param, f"grad_lifted_{i}")
        elements = "BLOCK elements of each row" if spec.rows else "BLOCK elements"
        doc = f"Backward scan, {spec.chunk} steps a chunk. One program: {elements}, all T."
        return w.finish(name, self._cores, doc)

    # The walk covers `_count` chunks, and starts with the chunk before chunk `_end`. Both are scalar expressions.
    _end = "chunks"
    _count = "chunks"

    def _limit_rest(self, condition: str) -> str:
        """The condition under which the steps after the last complete chunk are walked.

        Args:
            condition: the part of the condition that depends on the number of these steps.
        """
        return condition

    def _write_walk(self) -> None:
        """Writes the walk from the last step to the first."""
        w = self._writer
        if self._counting:
            self._walk_lengths()
        elif self._spec.single:
            self._shift_gradients("T")
            self._walk_once()
        else:
            w.integer("chunks", f"T // {self._spec.chunk}")
            self._shift_gradients("T")
            self._walk()
        for i, param in self._grad_states.items():
            w.store(param, f"grad_state_{i}")

    def _walk(self) -> None:
        """Writes the walk over all chunks, from the last step to the first."""
        w, chunk = self._writer, self._spec.chunk
        for param in self._list_moving():
            w.point(param, self._end, chunk)
        if self._spec.rest and chunk > 1:
            w.integer("left", f"T % {chunk}")
            if w.branches:
                for num_steps in range(1, chunk):
                    with w.when(self._limit_rest(f"left == {num_steps}")):
                        self._write_chunk("chunks", num_steps)
            else:
                with w.when(self._limit_rest("left > 0")):
                    self._write_chunk("chunks", chunk, partial=True)
        self._load_early(f"0 < {self._count}")
        with w.loop("i", "0", self._count, self._spec.stages):
            for param in self._list_moving():
                w.move(param, -chunk)
            w.integer("c", f"{self._end} - 1 - i")
            self._write_chunk("c", chunk, early=f"i + 1 < {self._count}")

    def _walk_once(self) -> None:
        """Writes all steps of a sequence that is one chunk.

        Without a loop, absent gradients of final states and absent initial states are constants for the compiler.
        """
        for param in self._list_moving():
            self._writer.point(param)
        self._write_chunk(None, self._spec.chunk)

    def _walk_lengths(self) -> None:
        """Writes all steps if the step function has inputs that count down."""
        w, chunk, ends = self._writer, self._spec.chunk, self._spec.ends
        w.bounds("least", "largest", list(self._counting.values()))
        w.integer("whole", f"least // {chunk}")
        w.integer("behind", f"({'largest' if ends else 'T'} + {chunk - 1}) // {chunk}")
        if ends:
            self._skip(f"behind * {chunk}", "T")
        self._shift_gradients("largest" if ends else "T")
        self._write_counted_chunks("behind", "whole")

    def _write_counted_chunks(self, end: str, num_chunks: str) -> None:
        """Writes the chunks before chunk `end` down to chunk `whole`, and then the `num_chunks` chunks before `whole`.

        Elements may have ended in the first chunks of this walk, but not in the last `num_chunks` chunks.
        """
        w, chunk = self._writer, self._spec.chunk
        for param in self._list_moving():
            w.point(param, end, chunk)
        with w.loop("j", "whole", end):
            for param in self._list_moving():
                w.move(param, -chunk)
            w.integer("c", f"{end} - 1 - (j - whole)")
            w.integer("left", f"T - c * {chunk}")
            self._write_chunk("c", chunk, partial=True)
        self._load_early(f"0 < {num_chunks}")
        with w.loop("i", "0", num_chunks, self._spec.stages):
            for param in self._list_moving():
                w.move(param, -chunk)
            w.integer("c", "whole - 1 - i")
            self._write_chunk("c", chunk, early=f"i + 1 < {num_chunks}")

    def _skip(self, first: str, end: str) -> None:
        """Writes the steps after all elements have ended.

        Gradients of state sequences are added to the gradients of states. Gradients of inputs are zeros.
        """
        w = self._writer
        if self._grad_state_seqs:
            with w.loop("n", first, end):
                w.integer("t", f"{end} - 1 - (n - {first})")
                for i, param in self._grad_state_seqs.items():
                    w.load(f"arriving_{i}", param, w.row(param, "t"))
                    w.accumulate(f"grad_state_{i}", f"arriving_{i}")
        if self._grad_inputs:
            with w.loop("t", first, end):
                w.assign("ended", w.zeros(torch.float32))
                for i, param in self._grad_inputs.items():
                    if i not in self._late:
                        w.store(param, "ended", w.row(param, "t"))

    def _shift_gradients(self, end: str) -> None:
        """Writes the gradients of late inputs at steps that no step before `end` reads, which are zeros.

        The gradients at other steps are shifted by the delays.
        """
        w = self._writer
        for i, late in self._late.items():
            if i not in self._grad_inputs:
                continue
            param, delays = self._grad_inputs[i], self._spec.inputs[i].late
            assert delays is not None
            with w.loop("n", "0", f"T - {end} + {delays.most}"):
                w.integer("t", "T - 1 - n")
                w.assign("ended", w.zeros(torch.float32))
                w.store(param, "ended", w.row(param, "t"), f"(n < T) & (t + {late} >= {end})")
            w.shift(param, late)

    def _declare_inputs(self) -> None:
        layouts = self._spec.inputs
        self._inputs = self._writer.add_inputs(layouts, self._used | find_declared_inputs(layouts))
        self._counting = load_counts(self._writer, layouts, self._inputs)
        self._late = load_delays(self._writer, layouts, self._inputs)

    def _declare_lifted(self) -> None:
        """Declares lifted tensors, and computes the values that are equal in all steps."""
        w, spec = self._writer, self._spec
        lifted = w.add_lifted(spec.lifted, self._used, spec.lifted_like)
        for i, param in lifted.items():
            w.load(f"lifted_{i}", param)
        for core in self._cores:
            self._numbers[core.name] += w.add_once(core, self._numbers[core.name])

    def _declare_grad_lifted(self) -> None:
        w, spec = self._writer, self._spec
        self._grad_lifted = w.add_present(Role.GRAD_LIFTED, spec.grad_lifted, spec.summed_lifted)
        for i in self._grad_lifted:
            w.assign(f"grad_lifted_{i}", w.zeros(spec.lifted_dtypes[i]))

    def _declare_others(self) -> None:
        self._declare_read()
        self._declare_carried()
        w, spec = self._writer, self._spec
        self._grad_inputs = w.add_present(Role.GRAD_INPUT, spec.grad_inputs, spec.summed_inputs)
        self._grad_states = w.add_present(Role.GRAD_STATE, spec.grad_states)

    def _declare_read(self) -> None:
        """Declares the tensors that the kernel reads in each step or chunk, except for inputs and lifted tensors."""
        w, spec = self._writer, self._spec
        # The indices of the states from which values of a chunk are computed.
        self._needed_states = [i for i in range(self._num_states) if Port(Role.STATE, i) in self._used]
        self._states = {
            i: w.add(Role.STATE, i, layout)
            for i in self._needed_states
            if i not in dict(spec.follows) and (layout := spec.states[i]) is not None
        }
        for i, param in self._states.items():
            w.load(f"initial_{i}", param)
        self._reloaded = dict(spec.follows)
        stored = [] if spec.single else [i for i in self._needed_states if i not in self._reloaded]
        self._checkpoints = {i: w.add(Role.CHECKPOINT, i) for i in stored}
        self._saved = {i: w.add(Role.SAVED, i) for i in range(spec.saved) if Port(Role.SAVED, i) in self._used}
        self._grad_outputs = w.add_present(Role.GRAD_OUTPUT, spec.grad_outputs)
        self._grad_state_seqs = w.add_present(Role.GRAD_STATE_SEQ, spec.grad_state_seqs)

    def _declare_carried(self) -> None:
        """Assigns the values that pass from step to step, as the last step receives them: state gradients and flags."""
        w, spec = self._writer, self._spec
        grad_finals = w.add_present(Role.GRAD_FINAL_STATE, spec.grad_final_states)
        for i, dtype in enumerate(spec.state_dtypes):
            if i in grad_finals:
                w.load(f"grad_state_{i}", grad_finals[i])
            else:
                w.assign(f"grad_state_{i}", w.zeros(dtype))
        for flag in spec.flags:
            w.assign(f"came_state_{flag.state}", w.flag(flag.given), flag=True)

    def _list_moving(self) -> list[Port]:
        return [
            *(param for i, param in self._inputs.items() if i not in self._counting and not self._spec.inputs[i].once),
            *self._saved.values(),
            *self._grad_outputs.values(),
            *self._grad_state_seqs.values(),
            *self._grad_inputs.values(),
        ]

    def _load_early(self, exists: str) -> None:
        """Loads the `early` inputs of the preceding chunk, if `exists` holds."""
        w, layouts, chunk = self._writer, self._spec.inputs, self._spec.chunk
        for k in range(chunk):
            for i, param in self._inputs.items():
                if layouts[i].early:
                    w.load(f"early_{i}_{k}", param, w.at(param, k - chunk), exists)

    def _write_chunk(self, number: str | None, steps: int, *, partial: bool = False, early: str | None = None) -> None:
        """Walks back through `steps` steps from the position of the pointers.

        Args:
            number: number of the chunk. `None` if it is the only one.
            partial: True to walk only the first `left` steps.
            early: the condition under which a chunk precedes this chunk. With a condition, the `early` inputs of this
                chunk have already been loaded, and those of the preceding chunk are loaded now. With `None`, all
                inputs of this chunk are loaded now.
        """
        self._early = early is not None
        self._first = "0" if number is None else f"{number} * {self._spec.chunk}"
        self._load_states(number)
        for k in range(steps):
            for i, name in self._counting.items():
                assign_count(
                    self._writer, f"input_{i}_{k}", name, f"{number} * {self._spec.chunk} + {k}" if partial else None
                )
            self._load_step(k, self._exists(k, partial))
        if early is not None:
            self._load_early(early)
        if self._needed_states:
            for k in range(steps - 1):
                self._recompute(k)
        for k in reversed(range(steps)):
            self._walk_back(k, partial)

    def _exists(self, k: int, partial: bool) -> str | None:
        return f"{k} < left" if partial else None

    def _load_states(self, number: str | None) -> None:
        """Loads the states before the chunk, which are a checkpoint or the initial states.

        The generated code has no branch, because a branch would delay the loads that follow it.
        """
        w = self._writer
        for i in self._needed_states:
            if number is None:
                w.assign(f"state_{i}_0", f"initial_{i}" if i in self._states else w.zeros(self._spec.state_dtypes[i]))
                continue
            if i in self._reloaded:
                source = self._reloaded[i]
                param = self._inputs[source]
                w.load(f"state_{i}_0", param, w.at(param, -1), self._has_begun(source, -1))
                continue
            param = self._checkpoints[i]
            w.load(f"state_{i}_0", param, w.row(param, number, -1), f"{number} > 0")  # 0 for chunk 0
            if i in self._states:
                w.select(f"state_{i}_0", f"{number} > 0", f"state_{i}_0", f"initial_{i}")

    def _load_step(self, k: int, exists: str | None) -> None:
        w = self._writer
        for i, param in self._inputs.items():
            if self._early and self._spec.inputs[i].early:
                w.assign(f"input_{i}_{k}", f"early_{i}_{k}")
            elif i not in self._counting and not self._spec.inputs[i].once:
                w.load(f"input_{i}_{k}", param, w.at(param, k), self._input_exists(i, k, exists))
        for i, param in self._saved.items():
            w.load(f"saved_{i}_{k}", param, w.at(param, k), exists)
        for i, param in self._grad_outputs.items():
            w.load(f"grad_output_{i}_{k}", param, w.at(param, k), exists)
        for i, param in self._grad_state_seqs.items():
            w.load(f"grad_state_seq_{i}_{k}", param, w.at(param, k), exists)

    def _input_exists(self, i: int, k: int, exists: str | None) -> str | None:
        """The condition under which an input has a value at step `k` of the chunk. `None` if it always has a value."""
        return conjoin(self._has_begun(i, k), exists)

    def _has_begun(self, i: int, k: int) -> str | None:
        """The condition under which a late input has begun at step `k` of the chunk. `None` for other inputs."""
        return f"{self._first} + {k} >= {self._late[i]}" if i in self._late else None

    def _recompute(self, k: int) -> None:
        """Computes the states before step `k + 1`."""
        assert self._core is not None
        new_states = [f"state_{i}_{k + 1}" for i in range(self._num_states)]
        results = [f"unused_{i}" for i in range(self._spec.num_outputs)] + new_states
        self._call(results, self._core, k)

    def _walk_back(self, k: int, partial: bool) -> None:
        w, spec, exists = self._writer, self._spec, self._exists(k, partial)
        for i in self._grad_state_seqs:
            w.accumulate(f"grad_state_{i}", f"grad_state_seq_{i}_{k}")
        num_results = sum(position is not None for position in spec.gradients)
        if num_results:
            self._call([f"result_{i}" for i in range(num_results)], self._vjp, k)
        for i, param in self._grad_inputs.items():
            gradient = self._name_gradient(self._input_gradients[i])
            self._store_gradient(i, param, gradient, k, exists)
        # Gradients at steps beyond T may be infinite, so they are replaced by a selection, not multiplied by zero.
        for i, position in enumerate(self._state_gradients):
            before = self._name_gradient(position, spec.state_dtypes[i])
            self._update(f"grad_state_{i}", before, exists)
        for flag in spec.flags:
            presence = " | ".join(f"came_state_{i}" for i in flag.states) or w.flag(flag.always)
            self._update(f"comes_state_{flag.state}", presence, exists, f"came_state_{flag.state}", flag=True)
        for flag in spec.flags:
            w.assign(f"came_state_{flag.state}", f"comes_state_{flag.state}", flag=True)
        for i in self._grad_lifted:
            position = self._lifted_gradients[i]
            if position is not None:
                w.accumulate(f"grad_lifted_{i}", f"result_{position}", spec.lifted_dtypes[i], exists)

    def _store_gradient(self, i: int, param: Port, gradient: str, k: int, exists: str | None) -> None:
        self._writer.store(param, gradient, self._writer.at(param, k), self._input_exists(i, k, exists))

    def _update(
        self, name: str, value: str, exists: str | None, before: str | None = None, *, flag: bool = False
    ) -> None:
        """Assigns `value` to `name`. Where the step does not exist, assigns `before`, which is `name` by default."""
        if exists is None:
            self._writer.assign(name, value, flag=flag)
        else:
            self._writer.select(name, exists, value, before or name, flag=flag)

    def _name_gradient(self, position: int | None, dtype: torch.dtype = torch.float32) -> str:
        return self._writer.zeros(dtype) if position is None else f"result_{position}"

    def _call(
        self, results: Sequence[str], core: CoreSource, k: int, replacements: Mapping[Port, str] = _NO_REPLACEMENTS
    ) -> None:
        """Computes a step or its VJP. `replacements` replaces the names of some arguments with other expressions."""
        arguments = [replacements.get(port) or self._name_argument(port, k) for port in core.arguments]
        self._writer.call(results, core, [*arguments, *self._numbers[core.name]])

    def _name_argument(self, port: Port, k: int) -> str:
        """The name of an argument of the step or its VJP at step `k` of the chunk."""
        moving = port.role in (Role.INPUT, Role.STATE, Role.SAVED) or port in self._grad_outputs.values()
        return f"{port.name}_{k}" if moving else port.name


class SkewedBackward(BackwardTemplate):
    """The backward of a step with one late input. Each element's walk is delayed by the integer part of its delay.

    Therefore, all elements of a program load this input from one row, and store its gradient to one row. From other
    sequences, each element loads its own row. Loads from different rows are several times as fast as stores to
    different rows.
    """

    def _declare_inputs(self) -> None:
        w, layouts = self._writer, self._spec.inputs
        self._inputs = w.add_inputs(layouts, self._used | find_declared_inputs(layouts))
        self._counting = {}
        late_input = find_only_late(layouts)
        assert late_input is not None
        self._late_index, delays = late_input
        self._rows, self._most = count_added_rows(delays, self._spec.chunk), delays.most
        w.load("delay", self._inputs[delays.by])
        w.whole_steps("late", "delay", delays.most)
        w.assign("early", "0 - late")
        self._late = {self._late_index: "late"}
        for i, param in self._inputs.items():
            if i != self._late_index and not layouts[i].once:
                w.shift(param, "early")

    def _declare_others(self) -> None:
        super()._declare_others()
        w = self._writer
        others = (param for i, param in self._grad_inputs.items() if i != self._late_index)
        read = (*self._saved.values(), *self._grad_outputs.values(), *self._grad_state_seqs.values())
        for param in (*read, *others):
            w.shift(param, "early")

    def _declare_carried(self) -> None:
        super()._declare_carried()
        w = self._writer
        for flag in self._spec.flags:  # the flag differs between elements, so it is not a constant
            compared = "==" if flag.given else "!="
            w.assign(f"came_state_{flag.state}", f"{w.zeros(torch.float32)} {compared} 0", flag=True)

    def _write_walk(self) -> None:
        """Writes a loop over chunks that lack steps of some elements, and another loop over the complete chunks."""
        w, chunk = self._writer, self._spec.chunk
        w.integer("behind", f"(T + {chunk - 1}) // {chunk}")
        w.integer("last", f"behind - (T + {self._rows * chunk - self._most}) // {chunk} + {self._rows}")
        w.integer("whole", "(behind - last) * (behind > last)")
        for param in self._list_moving():
            w.point(param, "behind", chunk)
        with w.loop("part", "0", "2"):
            self._write_chunks("part * (last + whole)", f"last + part * (behind + {self._rows} - last)", partial=True)
            self._write_chunks("last", "last + (1 - part) * whole", partial=False)
        for i, param in self._grad_states.items():
            w.store(param, f"grad_state_{i}")

    def _write_chunks(self, first: str, end: str, *, partial: bool) -> None:
        w, chunk = self._writer, self._spec.chunk
        with w.loop("i", first, end):
            for param in self._list_moving():
                w.move(param, -chunk)
            w.integer("c", "behind - 1 - i")
            self._write_chunk("c", chunk, partial=partial)

    def _write_chunk(self, number: str | None, steps: int, *, partial: bool = False, early: str | None = None) -> None:
        self._partial = partial
        for k in range(steps if partial else 0):
            step = f"{number} * {self._spec.chunk} + {k} + late"
            self._writer.assign(f"exists_{k}", f"({step} >= 0) & ({step} < T)", flag=True)
        super()._write_chunk(number, steps, partial=partial, early=early)

    def _exists(self, k: int, partial: bool) -> str | None:
        return f"exists_{k}" if partial else None

    def _input_exists(self, i: int, k: int, exists: str | None) -> str | None:
        if i != self._late_index or not self._partial:
            return exists
        return f"({self._first} + {k} >= 0) & ({self._first} + {k} < T)"

    def _load_states(self, number: str | None) -> None:
        w, first = self._writer, self._first
        for i in self._needed_states:
            name = f"state_{i}_0"
            if i in self._reloaded:
                param = self._inputs[self._late_index]
                w.load(name, param, w.at(param, -1), f"({first} > 0) & ({first} - 1 < T)")
                continue
            begun = f"{first} + late > 0"
            param = self._checkpoints[i]
            w.load(name, param, w.row(param, f"{number} + {self._rows}", -1), f"({begun}) & ({first} + late < T)")
            if i in self._states:
                w.select(name, begun, name, f"initial_{i}")

    def _recompute(self, k: int) -> None:
        super()._recompute(k)
        for i in range(self._num_states if self._partial else 0):
            if i not in self._reloaded:
                state = f"state_{i}_{k + 1}"
                self._writer.select(state, f"exists_{k}", state, f"state_{i}_{k}")

    def _walk_back(self, k: int, partial: bool) -> None:
        super()._walk_back(k, partial)
        for flag in () if partial else self._spec.flags:  # within a loop, a flag has one value for each element
            name = f"came_state_{flag.state}"
            self._writer.assign(name, f"{name} | ({self._writer.zeros(torch.float32)} != 0)", flag=True)

    def _store_gradient(self, i: int, param: Port, gradient: str, k: int, exists: str | None) -> None:
        if i == self._late_index and exists is not None:
            self._writer.select("gradient", exists, gradient, self._writer.zeros(torch.float32))
            gradient = "gradient"
        super()._store_gradient(i, param, gradient, k, exists)
