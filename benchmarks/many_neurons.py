"""Resources that remain after neurons are created, run and deleted: memory, modules, files, and file descriptors.

    python benchmarks/many_neurons.py [--output benchmarks/results/many_neurons.md] [--neurons 10000]

Each neuron is trained for one call and then deleted. It runs in the loop or in compiled kernels (in Triton's
interpreter if there is no GPU). Two of three neurons are custom neurons. Their steps are closures over one of five
numbers, so that they have five different kernels. All other neurons are ready-made neurons. Resources are counted after
the first tenth of the neurons and at the end. Resources that grow between the two counts would grow forever.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from torch import Tensor

from flexsn_codegen import cache_folder
from flexsn_nn import LIF, FlexSN
from flexsn_runtime import flexsn_kernel_registry_info, triton_interpreted, why_unavailable

NUMBERS = 5  # number of different leaks, and therefore of different kernels


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that a process holds.

    Attributes:
        memory: resident memory, in MB.
        objects: number of objects that the garbage collector tracks.
        modules: number of imported modules.
        generated: number of imported modules from generated sources.
        files: number of files in the cache folder.
        descriptors: number of open files.
        handles: number of handles of kernels.
    """

    memory: float
    objects: int
    modules: int
    generated: int
    files: int
    descriptors: int
    handles: int

    @staticmethod
    def now() -> Held:
        """Counts the resources after a garbage collection."""
        gc.collect()
        return Held(
            memory=_read_resident_memory() / 2**20,
            objects=len(gc.get_objects()),
            modules=len(sys.modules),
            generated=sum(name.startswith("flexsn_codegen._generated.") for name in sys.modules),
            files=sum(path.is_file() for path in cache_folder().rglob("*")),
            descriptors=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            handles=len(flexsn_kernel_registry_info()),
        )


def _read_resident_memory() -> int:
    if os.path.exists("/proc/self/statm"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_neuron(number: int, backend: str) -> FlexSN:
    """Makes a neuron: a ready-made neuron if `number` is a multiple of three, otherwise a custom neuron."""
    if number % 3 == 0:
        return LIF(tau=2.0 + number % NUMBERS, backend=backend)
    leak = 0.5 + number % NUMBERS / 100

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = leak * v + x
        return torch.tanh(h), h

    return FlexSN(core, 1, 1, 1, backend=backend)


def run(first: int, last: int, backend: str, device: str) -> None:
    """Creates neurons with these numbers, trains each neuron for one call, and deletes it."""
    for number in range(first, last):
        x = torch.ones(2, 8, device=device, requires_grad=True)
        output = make_neuron(number, backend)(x)
        assert isinstance(output, Tensor)
        output.sum().backward()


def held_by(backend: str, device: str, early: int, neurons: int) -> tuple[Held, Held]:
    """Returns the resources held after the first `early` neurons, and after all neurons."""
    run(0, early, backend, device)
    before = Held.now()
    run(early, neurons, backend, device)
    return before, Held.now()


def main(path: Path, neurons: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = why_unavailable(torch.device(device)) is None
    rows = []
    for backend in ("torch", "auto", *(("triton",) if kernels else ())):
        before, after = held_by(backend, device, neurons // 10, neurons)
        for count, held in ((neurons // 10, before), (neurons, after)):
            values = (held.objects, held.modules, held.generated, held.files, held.descriptors, held.handles)
            rows.append((backend, count, f"{held.memory:.0f}", *values))
    head = ("backend", "neurons", "MB", "objects", "modules", "generated", "files", "descriptors", "handles")
    lines = [
        "# Neurons created, run and deleted",
        "",
        f"`python benchmarks/many_neurons.py --neurons {neurons}`: resources that one process holds after this number",
        "of neurons, each of which was trained for one call.",
        "In Triton's interpreter." if triton_interpreted() else "",
        describe_machine(torch.device(device)),
        "",
        *table(head, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "many_neurons.md")
    parser.add_argument("--neurons", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLEXSN_CACHE_DIR"] = folder
        main(arguments.output, arguments.neurons)
