"""A library of C++ loops over functions of tensors, with which the rules for ops are tested without kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flexsn_codegen import Statement, emit_core
from flexsn_codegen.targets.cpp import Cpp, _compiler
from flexsn_codegen.targets.cpp._kernel import more_headers
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_graph import ArgumentType, trace_pointwise

COMPILER = shutil.which("g++") or shutil.which("clang++")
HEADERS = Path(_compiler.__file__).parent
TORCH_HEADERS = Path(torch.__file__).parent / "include"
# The flags of kernels, except that functions are visible, because they are called from outside of the library.
FLAGS = tuple(flag for flag in _compiler.FLAGS if flag != "-fvisibility=hidden")
# `tests/sanitize_cpp.py` sets these flags.
MORE_FLAGS = tuple(os.environ.get("FLEXSN_TEST_CPP_FLAGS", "").split())
WARNINGS = ("-Wall", "-Wextra", "-Werror")

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class _Loops(Cpp):
    """A target whose code for the function of one step is the body of a loop."""

    reserved = Cpp.reserved | {"n", "i"}

    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        loads = [f"[[maybe_unused]] const auto {name} = dev::load(in_{i}[i]);" for i, name in enumerate(arguments)]
        lines = [f"const auto {statement.name} = {statement.text};" for statement in statements]
        stores = [f"store_exactly(out_{i}[i], {result});" for i, result in enumerate(results)]
        return "".join(f"        {line}\n" for line in (*loads, *lines, *stores))


_TARGET = _Loops()
# A value must have exactly the register type of its dtype. Otherwise, the code does not compile.
_PRELUDE = """
template <typename T, typename V>
DEV_INLINE void store_exactly(T& place, V value) {
    static_assert(dev::is_same<V, decltype(dev::load(place))>);
    dev::store(place, value);
}
"""


@dataclass
class _Loop:
    name: str
    source: str
    used: tuple[int, ...]
    results: tuple[torch.dtype, ...]


@dataclass
class Library:
    """A collection of functions. After `compile`, each function is called by the name under which it was added."""

    _loops: dict[str, _Loop] = field(default_factory=dict)
    # The loop of each function, and the function's slice of the results of the loop.
    _parts: dict[str, tuple[str, slice]] = field(default_factory=dict)
    _loaded: ctypes.CDLL | None = None

    def add(self, name: str, function: Function, *arguments: torch.dtype) -> None:
        """Adds a function of tensors of the given dtypes."""
        types = [ArgumentType(dtype, False, False) for dtype in arguments]
        trace = trace_pointwise(function, types, 1, torch.device("cpu"), name)
        core = emit_core(trace.step, name, prune=True, target=_TARGET)
        used = tuple(port.index for port in core.arguments)
        self._add(name, core.source, [arguments[i] for i in used], trace.dtypes, used)

    def add_together(self, functions: Mapping[str, Function], *arguments: torch.dtype) -> None:
        """Adds functions by name, eight per loop, because the number of loops determines the time of tracing."""
        names = list(functions)
        for begin in range(0, len(names), 8):
            self._add_in_one({name: functions[name] for name in names[begin : begin + 8]}, arguments)

    def _add_in_one(self, functions: Mapping[str, Function], arguments: Sequence[torch.dtype]) -> None:
        lengths: dict[str, int] = {}

        def compute_all(*tensors: Tensor) -> tuple[Tensor, ...]:
            results: list[Tensor] = []
            for name, function in functions.items():
                output = function(*tensors)
                results += (part := (output,) if isinstance(output, Tensor) else output)
                lengths[name] = len(part)
            return tuple(results)

        loop = ", ".join(functions)
        self.add(loop, compute_all, *arguments)
        begin = 0
        for name in functions:
            self._parts[name] = loop, slice(begin, begin + lengths[name])
            begin += lengths[name]

    def add_text(self, name: str, text: str, arguments: Sequence[torch.dtype], result: torch.dtype) -> None:
        """Adds an expression of the values `x0`, `x1`, ..., which have the given dtypes."""
        names = [f"x{i}" for i in range(len(arguments))]
        body = _TARGET.function(name, names, [Statement("result", text)], ["result"])
        self._add(name, body, arguments, (result,), tuple(range(len(arguments))))

    def _add(
        self,
        name: str,
        body: str,
        arguments: Sequence[torch.dtype],
        results: Sequence[torch.dtype],
        used: tuple[int, ...],
    ) -> None:
        loop = f"loop_{len(self._loops)}"
        pointers = [f"const {cpp_name(dtype)}* __restrict in_{i}" for i, dtype in enumerate(arguments)]
        pointers += [f"{cpp_name(dtype)}* __restrict out_{i}" for i, dtype in enumerate(results)]
        head = f'// {name}\nextern "C" void {loop}(int64_t n, {", ".join(pointers)}) {{\n'
        source = f"{head}    for (int64_t i = 0; i < n; ++i) {{\n{body}    }}\n}}\n"
        assert name not in self._loops
        self._loops[name] = _Loop(loop, source, used, tuple(results))

    @property
    def source(self) -> str:
        body = "\n".join(loop.source for loop in self._loops.values())
        return f'{more_headers(body)}#include "device.h"\n{_PRELUDE}\n{body}'

    def compile(self, folder: Path) -> str:
        """Compiles and loads the library in `folder`, and returns the output of the compiler."""
        assert COMPILER is not None
        source, library = folder / "library.cpp", folder / "library.so"
        source.write_text(self.source)
        flags = (*FLAGS, *MORE_FLAGS, *WARNINGS, f"-I{HEADERS}", "-isystem", str(TORCH_HEADERS))
        command = [COMPILER, *flags, "-shared", "-fPIC", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._loaded = ctypes.CDLL(str(library))
        return done.stderr

    def call(self, name: str, *arguments: Tensor) -> tuple[Tensor, ...]:
        assert self._loaded is not None
        name, part = self._parts.get(name, (name, slice(None)))
        loop = self._loops[name]
        values = [arguments[i].contiguous() for i in loop.used]
        results = tuple(torch.empty(arguments[0].shape, dtype=dtype) for dtype in loop.results)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (*values, *results))
        self._loaded[loop.name](ctypes.c_int64(arguments[0].numel()), *pointers)
        return results[part]

    def __call__(self, name: str, *arguments: Tensor) -> Tensor:
        (result,) = self.call(name, *arguments)
        return result
