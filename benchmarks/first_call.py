"""Time of importing flexsn-codegen, and of the first call of a function, in a new process on the CPU.

    python benchmarks/first_call.py [--output FILE] [--rounds 7]

Figures are medians of CPU seconds over several processes. The processes of the different rows alternate. Bytecode is
compiled, as in an installed package, and the kernel is in the cache folder. `torch's own` is a first trace without this
project: PyTorch's `make_fx` of an addition of fake tensors. This trace imports PyTorch's compiler. The import takes
most of the time of a first call and cannot be avoided, because `make_fx`, fake tensors and every dispatch mode trigger
it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import describe_machine, publish, table

_BEGIN = "import time\nimport torch\nbegun = time.process_time()\n"
_END = "\nprint(time.process_time() - begun)"
_CALL = """
def gated(x, gate):
    return x * torch.sigmoid(gate) + 0.5
x = torch.randn(64, 64)
"""
_TRACE = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
with FakeTensorMode():
    make_fx(lambda x: x + 1)(torch.empty(3))
"""
PROGRAMS = {
    "import, after that of torch": _BEGIN + "import flexsn_codegen" + _END,
    "first call": "from flexsn_codegen import pointwise\n" + _BEGIN + _CALL + "pointwise(gated)(x, x)" + _END,
    "torch's own": "import flexsn_codegen\n" + _BEGIN + _TRACE + _END,
    "first call after torch's own": "from flexsn_codegen import pointwise\nimport torch\n"
    + _TRACE
    + _BEGIN
    + _CALL
    + "pointwise(gated)(x, x)"
    + _END,
}


def measure_program(program: str, folder: Path) -> float:
    """Returns the CPU seconds of a program in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "FLEXSN_CACHE_DIR": str(folder / "kernels")}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return float(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "first_call.md")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name, program in PROGRAMS.items():
                seconds = measure_program(program, Path(folder))
                if number:  # the first round compiles the bytecode and the kernel
                    times[name].append(seconds)
    rows = [
        [name, f"{statistics.median(seconds_of_row):.2f}", f"{min(seconds_of_row):.2f}"]
        for name, seconds_of_row in times.items()
    ]
    head = (
        f"`python benchmarks/first_call.py`: CPU seconds of {options.rounds} new processes per row. "
        + describe_machine(torch.device("cpu"))
    )
    publish(["# First calls", "", head, "", *table(["what", "median", "least"], rows)], options.output)


if __name__ == "__main__":
    main()
