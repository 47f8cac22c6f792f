"""Golden files: the complete kernels of the step functions in `scan_cores` equal the files in `golden/` byte for byte.

Each file holds the kernels of one step in one dtype: the kernel for inference, and the forward and backward for
training.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # as in the tests; must be set before Triton is imported

import pytest
import torch
from scan_cores import CASES, Case, problem
from torch import Tensor

from flexsn_runtime import ScanProgram, prepare, scan

pytestmark = pytest.mark.usefixtures("interpreted")

FOLDER = Path(__file__).parent / "golden"
COMMAND = "PYTHONPATH=tests hatch run python tests/test_scan_goldens.py"
STEP, ROWS = (3, 5), (160, 5)
SHORT, LONG = 2, 19


@dataclass(frozen=True, slots=True)
class Golden:
    """One file with the kernels of a step.

    Attributes:
        steps: number of steps. Up to eight steps are one chunk. More steps are several chunks, the last one partial,
            with checkpoints.
        strided: True if the dimensions of inputs are in another order than in memory.
        rows: True if steps are so large that each program processes several rows.
        options: options of the program.
    """

    case: Case
    dtype: torch.dtype = torch.float32
    steps: int = SHORT
    strided: bool = False
    rows: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        words = [self.case.name, str(self.dtype).removeprefix("torch.")]
        words += ["long"] * (self.steps > SHORT) + ["strided"] * self.strided + ["rows"] * self.rows
        return "_".join([*words, *(f"{key}_{value}" for key, value in self.options)])

    @property
    def text(self) -> str:
        functions = dict.fromkeys(f for source in self._sources() for f in _functions(source))
        return f"# Made by: {COMMAND}\n" + "".join(functions)

    def _sources(self) -> Iterator[str]:
        yield from self._run(_infer, states=False)
        yield from self._run(_infer, state_seqs=True)
        # The backward for gradients of only the outputs is compiled with the forward. The backward for all results is
        # compiled in its first call.
        yield from self._run(_train, residuals="recompute")
        yield from self._run(_train, residuals="save")
        yield from self._run(_train, residuals="recompute", state_seqs=True)

    def _run(
        self, call: Callable[..., None], *, states: bool = True, state_seqs: bool = False, **options: Any
    ) -> Iterator[str]:
        p = problem(self.case, self.steps, ROWS if self.rows else STEP, dtype=self.dtype)
        options.update(self.options)
        program = ScanProgram(p.core, *p.counts, **options)
        inputs = [x.detach().mT.contiguous().mT.requires_grad_() if self.strided else x for x in p.inputs]
        arguments = (*inputs, *(p.states if states else ()))
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLEXSN_CACHE_DIR", folder)
            call(program, arguments, [*arguments, *p.parameters], state_seqs)
            yield from (path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.py")))


def _functions(source: str) -> list[str]:
    """Returns the imports and functions of a source, without the line numbers in its references to user code."""
    plain = re.sub(r"(  # \w+\.py):\d+:", r"\1:", source)
    return [f"{part.rstrip()}\n\n\n" for part in re.split(r"^(?=@triton\.jit)", plain, flags=re.MULTILINE)]


def _infer(program: ScanProgram, arguments: Sequence[Tensor], leaves: Sequence[Tensor], state_seqs: bool) -> None:
    with torch.no_grad():
        scan(*prepare(program, tuple(arguments)), state_seqs=state_seqs)


def _train(program: ScanProgram, arguments: Sequence[Tensor], leaves: Sequence[Tensor], state_seqs: bool) -> None:
    results = [r for r in scan(*prepare(program, tuple(arguments)), state_seqs=state_seqs) if r.requires_grad]
    torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])


def _without_lines(source: str) -> str:
    """Removes the line numbers from references to the code of the step, because edits above the step would change
    them.
    """
    return re.sub(r"(  # \w+\.py):\d+:", r"\1:", source)


BY_NAME = {case.name: case for case in CASES}
GOLDENS = [
    *(Golden(case) for case in CASES),
    Golden(BY_NAME["lif_soft"], torch.bfloat16),
    Golden(BY_NAME["two_in_two_out"], torch.bfloat16),
    Golden(BY_NAME["izhikevich"], torch.bfloat16, options=(("precision", "float32"),)),
    Golden(BY_NAME["alif"], options=(("fast_math", True),)),
    Golden(BY_NAME["plif_channel"], steps=LONG, strided=True),
    Golden(BY_NAME["plif_channel"], rows=True),
    Golden(BY_NAME["alif"], steps=LONG),
]


@pytest.mark.long(
    all_but=[
        "if_float32",
        "lif_hard_float32",
        "lif_soft_detached_float32",
        "alif_float32_long",
        "alif_float32_fast_math_True",
        "plif_scalar_float32",
        "plif_neuron_float32",
        "plif_channel_float32_long_strided",
        "plif_channel_float32_rows",
        "two_in_two_out_bfloat16",
        "izhikevich_bfloat16_precision_float32",
    ]
)
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_kernels_equal_the_golden_files(golden: Golden) -> None:
    expected = (FOLDER / f"{golden.name}.txt").read_text(encoding="utf-8")
    assert golden.text == expected, f"if you mean it, run `{COMMAND}`"


def test_golden_files_have_kernels() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(golden.name for golden in GOLDENS)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for each in GOLDENS:
        (FOLDER / f"{each.name}.txt").write_text(each.text, encoding="utf-8")
