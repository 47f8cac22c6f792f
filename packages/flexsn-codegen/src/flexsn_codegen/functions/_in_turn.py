"""Launches C++ kernels one after the other in one call from Python.

The arguments of all launches are in one block of memory. Before a call, the addresses and numbers in this block that
have changed are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._launch import CPP_BLOCK
from flexsn_codegen.functions._plan import PlannedLaunch, Trace
from flexsn_codegen.targets.cpp import CppKernel
from flexsn_codegen.targets.cpp._kernel import program

_ALL = """#include <cstdint>

// A count, and for each launch where its function and its arguments are.
extern "C" __attribute__((visibility("default"))) const int64_t count = 1;
extern "C" __attribute__((visibility("default"))) void run(const int64_t* arguments) {
    const int64_t* table = reinterpret_cast<const int64_t*>(arguments[0]);
    for (int64_t i = 0; i < table[0]; ++i)
        reinterpret_cast<void (*)(const int64_t*)>(table[1 + 2 * i])(
            reinterpret_cast<const int64_t*>(table[2 + 2 * i]));
}
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """A launch, and the positions of its tensors among all tensors."""

    variant: Trace
    launch: PlannedLaunch
    cells: list[int]
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_in_cpp(self) -> bool:
        """True if `InTurn` can launch the kernel."""
        return isinstance(self.launch.built.compiled(), CppKernel) and all(o.offset == 0 for o in self.launch.operands)


class InTurn:
    """Prepared launches of C++ kernels, which can be repeated."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._all = program(_ALL)
        self._programs: list[Any] = []  # programs stay loaded as long as this object exists
        values: list[int] = []
        starts: list[int] = []
        places: list[int] = []
        cells: list[int] = []
        numbers: dict[int, tuple[Trace, list[list[int]]]] = {}
        for placed_launch in placed:
            kernel = placed_launch.launch.built.compiled()
            self._programs.append(
                kernel.compiled(placed_launch.dtypes, CPP_BLOCK, fast_math=placed_launch.launch.fast_math)
            )
            starts.append(len(values))
            places += range(len(values), len(values) + len(placed_launch.cells))
            cells += placed_launch.cells
            values += [*[0] * len(placed_launch.cells), *placed_launch.launch.integers]
            # One additional value for the number of threads.
            count = sum(len(number.arguments) for number in placed_launch.variant.steps[0].source.numbers) + 1
            variant_numbers = numbers.setdefault(id(placed_launch.variant), (placed_launch.variant, []))
            variant_numbers[1].append(list(range(len(values), len(values) + count)))
            values += [0] * count
        self._values = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._cells = torch.tensor(cells, dtype=torch.int64, device="cpu")
        self._numbers = [
            (trace, torch.tensor(positions, dtype=torch.int64, device="cpu")) for trace, positions in numbers.values()
        ]
        begin = self._values.data_ptr()
        table = [len(placed)]
        for compiled, start in zip(self._programs, starts, strict=True):
            table += [compiled.address, begin + 8 * start]
        self._table = torch.tensor(table, dtype=torch.int64, device="cpu")
        self._words: list[list[int]] = []

    def place(self, addresses: Tensor) -> None:
        """Sets the addresses of all tensors."""
        self._values[self._places] = addresses[self._cells]

    def run(self, words: Sequence[list[int]]) -> None:
        """Launches the kernels.

        Args:
            words: for each of `variants`, the integer arguments that represent its numbers.
        """
        threads = torch.get_num_threads()
        results = [[*variant_words, threads] for variant_words in words]
        if results != self._words:
            for variant_words, (_, places) in zip(results, self._numbers, strict=True):
                self._values[places] = torch.tensor(variant_words, dtype=torch.int64, device="cpu")
            self._words = results
        self._all([self._table.data_ptr()])

    @property
    def variants(self) -> list[Trace]:
        """The traces whose numbers are arguments of `run`."""
        return [trace for trace, _ in self._numbers]
