"""A C++ kernel, compiled for the dtypes of its tensors when it is first launched with these dtypes."""

from __future__ import annotations

import ctypes
import re
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets.cpp._compiler import load
from flexsn_codegen.targets.cpp._literals import cpp_name

# Allows the compiler to fuse a product and a sum into one instruction, and GCC to use one reciprocal for several
# divisions. NaN and infinity are preserved, and sums keep their order. The functions in `device/` depend on these two
# properties.
_FAST_MATH_PRAGMAS = """#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast,reciprocal-math")
#endif
"""


class CppKernel:
    """A kernel in C++. One program is compiled for each combination of dtypes, block size and `fast_math`.

    Attributes:
        __name__: name of the kernel's function.
        first_written: index of the first tensor to which the kernel writes. The kernel also writes to all later
            tensors.
    """

    def __init__(self, source: KernelSource) -> None:
        self.__name__ = source.name
        self._source = source
        pointers = [f"const {port.name}_t* " in source.source for port in source.params]
        self.first_written = sum(pointers)
        assert all(pointers[: self.first_written]), "the tensors to which the kernel writes come last"
        # The programs stay loaded as long as this kernel exists.
        self._runs: dict[tuple[tuple[torch.dtype, ...], int, bool], Program] = {}
        self._texts: dict[tuple[tuple[torch.dtype, ...], int, bool], str] = {}

    def compiled(self, dtypes: tuple[torch.dtype, ...], block: int, *, fast_math: bool = False) -> Program:
        """The program for these dtypes.

        The program's arguments are the tensors' addresses, the sizes, and the largest number of threads, or 0 for
        OpenMP's number of threads. The program uses fewer threads if more threads would not be faster.

        Args:
            dtypes: dtypes of the kernel's tensors, in order.
            block: elements per program.
            fast_math: True to allow fused multiply-add, and products with reciprocals instead of divisions.

        Raises:
            CompilerMissingError, CompilationError, CacheFolderError: see `program`.
        """
        key = (dtypes, block, fast_math)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = program(self.text(dtypes, block, fast_math=fast_math))
        return run

    def text(self, dtypes: tuple[torch.dtype, ...], block: int, *, fast_math: bool = False) -> str:
        """The source of a program, with an entry for these dtypes and this block size."""
        key = (dtypes, block, fast_math)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = (_FAST_MATH_PRAGMAS if fast_math else "") + self._write(dtypes, block)
        return text

    def _write(self, dtypes: tuple[torch.dtype, ...], block: int) -> str:
        source = self._source
        names = [cpp_name(dtype) for dtype in dtypes]
        tensors = [f"reinterpret_cast<{name}*>(arguments[{i}])" for i, name in enumerate(names)]
        numbers = [f"arguments[{len(names) + i}]" for i in range(len(source.sizes) + 1)]
        call = f"{source.name}<{', '.join([str(block), *names])}>(\n        {', '.join([*tensors, *numbers])});"
        text = f"{source.source}\nDEV_ENTRY({len(tensors) + len(numbers)}) {{\n    {call}\n}}\n"
        return more_headers(text) + text


# Headers that take long to compile. Only sources with calls that match the pattern of a header include this header.
_MORE_HEADERS = {
    "special.h": re.compile(r"\bdev::special::"),
    "device/tiles.h": re.compile(r"\bdev::transpose\("),
    "device/trigonometric.h": re.compile(r"\bdev::(?:sin|cos|tan)\("),
}


def more_headers(source: str) -> str:
    """The `#include` lines of the headers in `_MORE_HEADERS` that a source needs."""
    return "".join(f'#include "{name}"\n' for name, calls in _MORE_HEADERS.items() if calls.search(source))


def program(text: str) -> Program:
    """Compiles a source to a program, unless the process already has this program.

    The program's library is closed when the last reference to the program is deleted.

    Args:
        text: result of `CppKernel.text`.

    Raises:
        CompilerMissingError: there is no compiler.
        CompilationError: the compiler rejects the source.
        CacheFolderError: see `flexsn_codegen.cache_folder`.
    """
    run = _programs.get(text)
    if run is None:
        library = load(text)
        count = ctypes.c_int64.in_dll(library, "count").value
        run = _programs[text] = Program(library["run"], count)
    return run


class Program:
    """A compiled program. A call runs the kernel. `CppKernel.compiled` describes the arguments of a call.

    Attributes:
        function, pack: the two functions of a call, which is `function(pack(*arguments))`.
    """

    __slots__ = ("__weakref__", "function", "pack")  # the function keeps its library loaded

    def __init__(self, function: Any, count: int) -> None:
        function.argtypes, function.restype = [ctypes.c_char_p], None
        # Packing takes a quarter of the time that filling a ctypes array takes.
        self.function, self.pack = function, struct.Struct(f"{count}q").pack

    def __call__(self, arguments: Sequence[int]) -> None:
        self.function(self.pack(*arguments))

    @property
    def address(self) -> int:
        """Address of the function, which takes a pointer to the arguments. Valid as long as this object exists."""
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0


_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
