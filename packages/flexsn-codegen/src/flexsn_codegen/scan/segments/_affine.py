"""The forward scan of affine steps by composition: each segment of time is an affine map of the state before it.

The order of summation differs from that of the serial kernel, so the results of the two kernels are equal up to
rounding.
"""

from __future__ import annotations

from flexsn_codegen.scan._spec import ForwardSpec
from flexsn_codegen.scan.segments._bounds import TOGETHER, define_bounds, divide_segment
from flexsn_codegen.scan.segments._forward import SegmentsTemplate
from flexsn_codegen.scan.segments._maps import SegmentMaps
from flexsn_codegen.source._source import CoreSource, KernelSource
from flexsn_graph import Port, Role


def state_maps_source(name: str, core: CoreSource, linear: CoreSource | None, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that computes the maps (`SegmentMaps`) of all segments except for the last one.

    The first segment starts with the initial states instead of zeros.

    Args:
        name: start of the kernel's name.
        core, spec: see `forward_source`.
        linear: the linear part of the step, `[inputs, states, lifted] -> [*new_states]`. New states that do not depend
            on a state are omitted. `None` if no new state depends on a state.
    """
    return _StateMaps(core, linear, spec).write(name)


def starts_source(name: str, core: CoreSource, num_states: int) -> KernelSource:
    """Writes the kernel that combines the maps into the states before all segments except for the first one.

    Args:
        name: start of the kernel's name.
        core: the step, of which only the target is used.
    """
    w = core.target.writer(())
    w.begin()
    w.add_segments()
    maps = SegmentMaps(w, "state", range(num_states))
    starts = [w.add(Role.SEGMENT_START, i) for i in range(num_states)]
    maps.load_rest("0")
    for i, param in enumerate(starts):
        w.store(param, f"state_{i}", w.row(param, "1"))
    with w.loop("n", "0", f"(SEGMENTS + {TOGETHER - 3}) // {TOGETHER}"):
        inner = [f"n * {TOGETHER} + {u + 2} < SEGMENTS" for u in range(TOGETHER)]
        for u in range(TOGETHER):
            maps.load(u, f"n * {TOGETHER} + {u + 1}", exists=inner[u])
        for u in range(TOGETHER):
            maps.combine(u)
            maps.advance(inner[u])
            for i, param in enumerate(starts):
                w.store(param, f"state_{i}", w.row(param, f"n * {TOGETHER} + {u + 2}"), inner[u])
    return w.finish(name, [], "States before segments. One program: BLOCK elements, all segments.")


def from_starts_source(name: str, core: CoreSource, spec: ForwardSpec) -> KernelSource:
    """Writes the kernel that walks all segments in parallel. Each segment starts with the states before it.

    Args:
        name: start of the kernel's name.
        core, spec: see `forward_source`.
    """
    return _FromStarts(core, spec).write(name)


class _StateMaps(SegmentsTemplate):
    def __init__(self, core: CoreSource, linear: CoreSource | None, spec: ForwardSpec) -> None:
        super().__init__(core, spec)
        self._linear = linear
        if linear is not None:
            self._used |= frozenset(linear.arguments)

    def write(self, name: str) -> KernelSource:
        w, spec, linear, chunk = self._writer, self._spec, self._linear, self._spec.chunk
        w.begin()
        w.segment()
        linear_numbers = [] if linear is None else w.add_numbers(linear)
        self._declare_read()
        self._linear_numbers = [] if linear is None else [*linear_numbers, *w.add_once(linear, linear_numbers)]
        maps = SegmentMaps(w, "state", range(len(spec.states)))
        w.integer("chunks", f"T // {chunk}")
        define_bounds(w, "segment")
        for i, dtype in enumerate(spec.state_dtypes):
            w.select(f"state_{i}", "segment == 0", f"state_{i}", w.zeros(dtype))
        maps.begin(spec.state_dtypes)
        for param in self._list_moving_inputs():
            w.point(param, "first", chunk)
        if self._counting:
            divide_segment(w, chunk, ends=spec.ends)
        self._warm_up("first", "alive" if spec.ends else "behind")
        maps.store()
        doc = f"Maps of the states of segments, {chunk} steps a chunk. One program: BLOCK elements, one segment."
        return w.finish(name, [self._core, *([] if linear is None else [linear])], doc)

    def _write_columns(self, k: int) -> None:
        w, linear, dtypes = self._writer, self._linear, self._spec.state_dtypes
        for j in range(len(dtypes)):
            if linear is not None:
                arguments = [self._name_argument(port, j, k) for port in linear.arguments]
                results = [f"linear_{port.index}" for port in linear.results]
                w.call(results, linear, [*arguments, *self._linear_numbers])
            for i, dtype in enumerate(dtypes):
                is_linear = linear is not None and Port(Role.STATE, i) in linear.results
                w.assign(f"column_{j}_{i}", f"linear_{i}" if is_linear else w.zeros(dtype))

    @staticmethod
    def _name_argument(port: Port, column: int, k: int) -> str:
        if port.role is Role.STATE:
            return f"column_{column}_{port.index}"
        return f"{port.name}_{k}" if port.role is Role.INPUT else port.name


class _FromStarts(SegmentsTemplate):
    def write(self, name: str) -> KernelSource:
        w, chunk = self._writer, self._spec.chunk
        w.begin()
        w.segment()
        self._declare_read()
        starts = [w.add(Role.SEGMENT_START, i) for i in range(len(self._spec.states))]
        self._declare_written()
        w.integer("chunks", f"T // {chunk}")
        define_bounds(w, "segment")
        for i, param in enumerate(starts):
            w.load(f"start_{i}", param, w.row(param, "segment"), "segment > 0")
            w.select(f"state_{i}", "segment > 0", f"start_{i}", f"state_{i}")
        for param in self._list_moving():
            w.point(param, "first", chunk)
        self._walk()
        for i, param in self._finals.items():
            w.store(param, f"state_{i}", exists="behind == chunks")
        doc = f"Forward scan of segments, {chunk} steps a chunk. One program: BLOCK elements, one segment."
        return w.finish(name, [self._core], doc)
