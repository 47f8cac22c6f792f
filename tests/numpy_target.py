"""A target that is defined outside of the packages. Its kernels are short and slow NumPy functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from flexsn_codegen import CoreSource, KernelSource, KernelWriter, Number, OpCall, Statement, Target, register_op
from flexsn_graph import Port


def _name(dtype: torch.dtype) -> str:
    return f"np.{str(dtype).removeprefix('torch.')}"


class NumPy(Target):
    """A target whose programs compute all elements of a step as one array."""

    name = "NumPy"
    reserved = frozenset({"np", "float"})
    header = "import numpy as np\n"

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in {torch.float32, torch.float64, torch.int32, torch.int64, torch.bool}

    def literal(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return f'{_name(dtype)}("{value}")' if dtype.is_floating_point else f"{_name(dtype)}({value})"

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        return text  # values are computed in their own dtype

    def filled(self, number: str, like: str) -> str:
        return f"np.full({like}.shape, {number})"

    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        lines = [*(f"{s.name} = {s.text}" for s in statements), f"return ({', '.join(results)},)"]
        return f"def {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)

    def writer(self, strided: Any = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        return NumPyWriter(self, strided, sizes)

    def compile(self, source: KernelSource) -> Any:
        module: dict[str, Any] = {}
        exec(source.source, module)
        return module[source.name]


class NumPyWriter(KernelWriter):
    """A writer of kernels in NumPy.

    In the kernels, `off` contains the indices of the step's elements, and `<operand>_at` is the offset of an operand's
    current step.
    """

    def begin(self) -> None:
        self._offsets: dict[Port, str] = {}
        self._times: dict[Port, str] = {}
        self.line(f"off = np.arange({self._elements})")

    def _declare(self, port: Port, terms: Sequence[tuple[str, str, str]] | None, *, strided_time: bool) -> None:
        self._times[port] = f"{port.name}_time" if strided_time else self._elements
        offsets = ["0 * off", *(f"off // {inner} % {size} * {stride}" for inner, size, stride in terms or ())]
        self._offsets[port] = "off" if terms is None else " + ".join(offsets)

    def number(self, number: Number) -> None:
        words = f"np.array([{', '.join(number.arguments)}], np.int32)"
        wide = number.dtype.is_floating_point or number.dtype.itemsize >= 4
        bits = f"{words}.view({_name(number.dtype)})" if wide else f"{words}.astype({_name(number.dtype)})"
        self.line(f"{number.name} = {bits}[0]")

    def _time(self, port: Port) -> str:
        return "1" if port in self._sums else self._times[port]

    def point(self, port: Port, chunks: str = "", length: int = 1) -> None:
        self.line(f"{port.name}_at = {chunks or 0} * {length} * {self._time(port)}")

    def at(self, port: Port, step: int = 0) -> str:
        return f"{port.name}_at + {step} * {self._time(port)}"

    def row(self, port: Port, number: str, shift: int = 0) -> str:
        return f"({number} + {shift}) * {self._time(port)}"

    def move(self, port: Port, steps: int) -> None:
        self.line(f"{port.name}_at += {steps} * {self._time(port)}")

    def load(self, name: str, port: Port, place: str | None = None, exists: str | None = None) -> None:
        array = f"{port.name}_ptr"
        zeros = f"np.zeros({self._elements}, {array}.dtype)"
        self.line(f"{name} = {array}[{place or 0} + {self._offsets[port]}] if {exists or True} else {zeros}")

    def store(self, port: Port, value: str, place: str | None = None, exists: str | None = None) -> None:
        total = port in self._sums
        where = f"{place or 0}" if total else f"{place or 0} + {self._offsets[port]}"
        self.line(f"if {exists or True}: {port.name}_ptr[{where}] = {f'np.sum({value})' if total else value}")

    def zeros(self, dtype: torch.dtype) -> str:
        return f"np.zeros({self._elements}, {_name(dtype)})"

    def assign(self, name: str, text: str, *, flag: bool = False) -> None:
        self.line(f"{name} = {text}")

    def select(self, name: str, condition: str, text: str, other: str, *, flag: bool = False) -> None:
        self.line(f"{name} = {text} if {condition} else {other}")

    def accumulate(self, name: str, value: str, dtype: torch.dtype | None = None, condition: str | None = None) -> None:
        self.line(f"{name} = {name} + ({value} if {condition or True} else 0)")

    def call(self, results: Sequence[str], core: CoreSource, arguments: Sequence[str]) -> None:
        self.line(f"{', '.join(results)}, = {core.name}({', '.join(arguments)})")

    def flag(self, value: bool) -> str:
        return str(value)

    def integer(self, name: str, expression: str) -> None:
        self.line(f"{name} = {expression}")

    def loop(self, variable: str, start: str, end: str, stages: int = 1) -> AbstractContextManager[None]:
        return self._block(f"for {variable} in range({start}, {end}):")

    def when(self, condition: str) -> AbstractContextManager[None]:
        return self._block(f"if {condition}:")

    @contextmanager
    def _block(self, header: str) -> Iterator[None]:
        self.line(header)
        with self.indented():
            self.line("pass")
            yield

    def _kernel(self, name: str, arguments: Sequence[str], body: str, doc: str) -> str:
        return f'def {name}({", ".join(arguments)}):\n    """{doc}"""\n{body}\n'


NUMPY = NumPy()
TEMPLATES = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "exp": "np.exp({0})",
    "ge": "{0} >= {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "where": "np.where({0}, {1}, {2})",
}


def _register(name: str, template: str) -> None:
    @register_op(getattr(torch.ops.prims, name).default, target=NUMPY)
    def rule(call: OpCall) -> str:
        return template.format(*call.operands)


for _prim, _template in TEMPLATES.items():
    _register(_prim, _template)


@register_op(torch.ops.prims.convert_element_type.default, target=NUMPY)
def _convert(call: OpCall) -> str:
    return f"{call.operands[0]}.astype({_name(call.result)})"
