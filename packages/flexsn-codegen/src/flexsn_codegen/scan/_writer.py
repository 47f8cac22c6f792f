"""What the forward and the backward template share: arguments, offsets, loads and stores."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from flexsn_codegen._core import HEADER, CoreSource, identifier
from flexsn_codegen.scan._spec import DENSE, InputLayout, KernelSource, StepLayout, Strided
from flexsn_graph import Port, Role


def _mask(exists: str | None) -> str:
    return f"mask & ({exists})" if exists else "mask"


class ScanWriter:
    """Collects the arguments and lines of one kernel.

    In the source, `off` is the element's number in the step, `mask` guards the last block, `step` is `NCL`
    in int64, and `<operand>_at` is a scalar pointer to the operand's current time step.

    Args:
        strided: layouts of operands that are declared without one, and are not dense.
    """

    def __init__(self, strided: Strided = ()) -> None:
        self._strided = dict(strided)
        self._lines: list[str] = []
        self._indent = 1
        self._params: list[Port] = []
        self._sizes: list[str] = ["T", "NCL"]
        # Without one: all elements of the step read one number, which is loaded once and not for each of them.
        self._offsets: dict[Port, str] = {}
        self._sums: set[Port] = set()
        self._times: dict[Port, str] = {}

    # -- lines -------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        self.line(header)
        self._indent += 1
        before = len(self._lines)
        yield
        if len(self._lines) == before:
            self.line("pass")
        self._indent -= 1

    def loop(self, variable: str, start: str, end: str, stages: int) -> AbstractContextManager[None]:
        """A loop whose loads are issued `stages - 1` rounds ahead."""
        rounds = f"tl.range({start}, {end}, num_stages={stages})" if stages > 1 else f"range({start}, {end})"
        return self.block(f"for {variable} in {rounds}:")

    # -- operands ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        # int64 from the first product on: T * NCL passes 2**31 at T=32, batch 64, 64 x 224 x 224.
        self.line("off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)")
        self.line("mask = off < NCL")
        self.line("step = tl.cast(NCL, tl.int64)")

    def add(self, role: Role, index: int, layout: StepLayout = DENSE, *, strided_time: bool = False) -> Port:
        """Declares a tensor argument and its offset within a step."""
        param = Port(role, index)
        known = self._strided.get(param)
        if known is not None:
            layout, strided_time = known.step, known.strided_time
        self._params.append(param)
        self._times[param] = "step"
        if strided_time:
            self._sizes.append(f"{param.name}_time")
            self._times[param] = f"tl.cast({param.name}_time, tl.int64)"
        if layout == DENSE:
            self._offsets[param] = "off"
            return param
        if layout == 0:
            return param
        terms = []
        for i in range(layout):
            inner, size, stride = (f"{param.name}_{what}{i}" for what in ("inner", "size", "stride"))
            self._sizes += [inner, size, stride]
            terms.append(f"(off // {inner}) % {size} * {stride}")
        self._offsets[param] = f"{param.name}_off"
        self.line(f"{param.name}_off = {' + '.join(terms)}")
        return param

    def add_inputs(self, layouts: Sequence[InputLayout], used: Collection[Port]) -> dict[int, Port]:
        """Declares the inputs, by number, that are among the arguments `used`."""
        return {
            i: self.add(Role.INPUT, i, layout.step, strided_time=layout.strided_time)
            for i, layout in enumerate(layouts)
            if Port(Role.INPUT, i) in used
        }

    def add_lifted(self, layouts: Sequence[StepLayout], used: Collection[Port]) -> dict[int, Port]:
        """Declares the lifted tensors, by number, that are among the arguments `used`."""
        return {i: self.add(Role.LIFTED, i, layout) for i, layout in enumerate(layouts) if Port(Role.LIFTED, i) in used}

    def add_present(
        self, role: Role, present: Sequence[bool], summed: Sequence[bool] = ()
    ) -> dict[int, Port]:
        """Declares the tensors of one role, by number, that are present.

        Args:
            summed: of which each program writes one number; empty: of none.
        """
        params = {i: self.add(role, i) for i, there in enumerate(present) if there}
        self._sums |= {param for i, param in params.items() if summed and summed[i]}
        self._times |= dict.fromkeys(self._sums, "tl.num_programs(0)")
        return params

    def load(self, target: str, param: Port, at: str | None = None, exists: str | None = None) -> None:
        """Loads one step of `param`.

        Args:
            at: a scalar pointer, by default the argument itself.
            exists: a scalar condition; where it does not hold, zeros are loaded. By default, it does.
        """
        pointer = at or f"{param.name}_ptr"
        if param in self._offsets:
            self.line(f"{target} = dev.load({pointer} + {self._offsets[param]}, {_mask(exists)})")
        else:
            self.line(f"{target} = tl.broadcast_to(dev.load({pointer}, {exists or True}), [BLOCK])")

    def store(self, param: Port, value: str, at: str | None = None, exists: str | None = None) -> None:
        """Stores one step of `param`, or its sum; `at` and `exists` as for `load`."""
        pointer = at or f"{param.name}_ptr"
        if param in self._sums:
            total = f"tl.sum(tl.where(mask, {value}, 0), axis=0)"
            self.line(f"tl.store({pointer} + tl.program_id(0), {total}, {exists or True})")
        else:
            self.line(f"dev.store({pointer} + {self._offsets[param]}, {value}, {_mask(exists)})")

    def time_of(self, param: Port) -> str:
        """The distance between two time steps of `param`, in elements."""
        return self._times[param]

    def point(self, param: Port, rows: str = "0") -> None:
        """Sets the operand's scalar pointer to time step or row `rows`."""
        start = f"{param.name}_ptr"
        self.line(f"{param.name}_at = {start}" + ("" if rows == "0" else f" + {rows} * {self.time_of(param)}"))

    def at(self, param: Port, step: int = 0) -> str:
        return f"{param.name}_at" + (f" + {step} * {self.time_of(param)}" if step else "")

    def move(self, param: Port, steps: int) -> None:
        sign, count = ("-", -steps) if steps < 0 else ("+", steps)
        self.line(f"{param.name}_at {sign}= {count} * {self.time_of(param)}")

    def zeros(self, target: str, dtype: str) -> None:
        self.line(f"{target} = tl.zeros([BLOCK], {dtype})")

    # -- the whole ---------------------------------------------------------------------------------------

    def finish(self, name: str, cores: Sequence[CoreSource], doc: str) -> KernelSource:
        arguments = [f"{p.name}_ptr" for p in self._params] + self._sizes
        body = "\n".join(self._lines)
        text = f"({', '.join(arguments)})\n{body}\n{[core.name for core in cores]}"
        full_name = f"{identifier(name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        signature = ",\n    ".join([*arguments, "BLOCK: tl.constexpr"])
        functions = "\n\n".join(core.source for core in cores)
        # T is not specialised on: one binary serves every T.
        kernel = (
            f'@triton.jit(do_not_specialize=["T"])\ndef {full_name}(\n    {signature},\n):\n    """{doc}"""\n{body}\n'
        )
        source = f"{HEADER}\n\n{functions}\n\n{kernel}"
        return KernelSource(full_name, source, tuple(self._params), tuple(self._sizes))
