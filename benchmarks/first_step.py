"""Times of the parts of a new process's first training step on a GPU, and of later steps with other T and other sizes.

    python benchmarks/first_step.py [--output FILE] [--layers LIF:8x1x100000 RLIF:250x128x1024 ...] [--timeline FILE]

A layer is NAME:TxBxH. Two processes measure it: one with empty caches on the disk, and one with the caches that the
first process has filled. Python's bytecode is compiled before the measurement, because `pip install` compiles it, too.
Without bytecode (`--no-bytecode`), the import of torch's compiler takes most of a first step.

`import` is the import of torch, Triton and this project, before the step. The following columns are the parts of the
step, in seconds. Some parts run at the same time, so their sum may exceed the step. `compiler` is the import of torch's
compiler. torch's first fake tensor triggers it, and so does torch's first optimizer. `trace` and `vjp` make the graphs,
`write` makes the source code of the kernels, `prepare` reads Triton and compiles its driver, `compile` compiles
kernels, and `load` loads them on the GPU and compiles the code that launches them. `rest` is the time in which none of
these parts runs. Afterwards, the process with empty caches calls LIF with a different T and with other step sizes. The
second table shows the number of kernels that each of these calls compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_BEGUN = time.perf_counter()

# ruff: noqa: E402
import torch
from measure import describe_machine, publish, synchronize, table

LIMIT, LIMIT_OF_LIF = 4.0, 2.5
LAYERS = (
    "LIF:8x1x100000",
    "LIF:1024x1x100000",
    "RLIF:250x128x256",
    "RLIF:250x256x512",
    "RLIF:250x128x1024",
    "GRU:250x128x256",
    "GRU:250x128x512",
    "LSTM:250x128x256",
)
LARGEST = 2**30  # elements of a sequence
PARTS = ("compiler", "trace", "vjp", "write", "prepare", "compile", "load")
HEADER = ["layer", "caches", "import", *PARTS, "rest", "first step", "at most", "kernels"]
Interval = tuple[str, float, float, str, str]  # part, begin, end, thread, kernel


class Clock:
    """A record of when functions run, and in which thread."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.calls: Counter[str] = Counter()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            kernel = getattr(first, "name", None) or getattr(first, "__name__", "")
            with self.running(part, kernel if isinstance(kernel, str) else ""):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def running(self, part: str, kernel: str = "") -> Iterator[None]:
        self.calls[part] += 1
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.intervals.append((part, begun, time.perf_counter(), threading.current_thread().name, kernel))

    def seconds(self, *parts: str) -> float:
        """Returns the seconds in which at least one of these parts runs."""
        total, last = 0.0, 0.0
        for begin, end in sorted((begin, end) for part, begin, end, *_ in self.intervals if part in parts):
            total += max(0.0, end - max(begin, last))
            last = max(last, end)
        return total


class _TimedImport(importlib.abc.MetaPathFinder):
    """An importer that measures the import of torch's compiler."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        loader.exec_module = self._clock.timed("compiler", loader.exec_module)
        return spec


def replace_function(owner: Any, name: str, clock: Clock, part: str) -> None:
    """Replaces a function of `owner` by one that the clock measures."""
    setattr(owner, name, clock.timed(part, getattr(owner, name)))


def watch_parts() -> Clock:
    """Measures the functions of each part with a clock, which it returns. Call `watch` before other modules import
    these functions.
    """
    clock = Clock()
    sys.meta_path.insert(0, _TimedImport(clock))
    compiler: Any = importlib.import_module("triton.compiler.compiler")
    graph: Any = importlib.import_module("flexsn_graph")
    for name in ("trace_step", "trace_core"):
        replace_function(graph, name, clock, "trace")
    for trace_class in (graph.StepTrace, graph.RecurrentTrace):
        trace_class.vjp = clock.timed("vjp", trace_class.__dict__["vjp"])
    codegen: Any = importlib.import_module("flexsn_codegen")
    cuda: Any = importlib.import_module("flexsn_codegen.targets.cuda")
    recurrent: Any = importlib.import_module("flexsn_codegen.targets.triton._recurrent")
    for owner, name in (
        (codegen, "emit_core"),
        (codegen, "forward_source"),
        (codegen, "backward_source"),
        (cuda, "cluster_source"),
        (recurrent, "loop_source"),
        (type(codegen.TRITON), "compile"),
    ):
        replace_function(owner, name, clock, "write")
    replace_function(cuda.CudaKernel, "cubin", clock, "compile")
    replace_function(cuda.CudaFunction, "__init__", clock, "load")
    replace_function(compiler.CompiledKernel, "_init_handles", clock, "load")
    private: Any = importlib.import_module("flexsn_codegen.targets.triton._triton_private")
    replace_function(private, "load_driver", clock, "prepare")
    replace_function(private, "read_compiler", clock, "prepare")
    replace_function(importlib.import_module("flexsn_codegen.targets.cuda._nvrtc"), "_compile", clock, "NVRTC")
    # A kernel may reach the compiler through any of these names.
    compile_kernel = clock.timed("compile", compiler.compile)
    for name in ("triton.compiler.compiler", "triton.compiler", "triton"):
        importlib.import_module(name).compile = compile_kernel  # type: ignore[attr-defined]
    return clock


def make_lif() -> Any:
    from step_functions import lif as step

    from flexsn_nn import FlexSN

    return FlexSN(step, 1, 1, 1, backend="triton")


def make_layer(name: str, hidden: int) -> Any:
    if name == "LIF":
        return make_lif()
    from recurrence import Gates, GRUCell, Layer, LSTMCell

    layers: dict[str, Any] = {
        "RLIF": lambda: Layer(hidden, "auto"),
        "GRU": lambda: Gates(hidden, GRUCell(hidden), 3, 1),
        "LSTM": lambda: Gates(hidden, LSTMCell(hidden), 4, 2),
    }
    return layers[name]()


def run_worker(layer: str, device: torch.device, *, others: bool) -> dict[str, Any]:
    """Runs the first step of a layer in this process, and returns its times. If `others` is True, also runs LIF with
    other sizes.
    """
    torch.zeros(1, device=device)
    clock = watch_parts()
    name, _, shape = layer.partition(":")
    steps, batch, hidden = map(int, shape.split("x"))
    net = make_layer(name, hidden).to(device)
    parameters = list(net.parameters())

    def train(num_steps: int, size: int) -> tuple[float, int]:
        x = torch.randn(num_steps, batch, size, device=device, requires_grad=True)
        grad = torch.randn(num_steps, batch, size, device=device)
        if name == "LIF":
            net.reset()
        synchronize(device)
        begun, compiled_before = time.perf_counter(), clock.calls["compile"]
        torch.autograd.grad(net(x), [x, *parameters], grad)
        synchronize(device)
        return time.perf_counter() - begun, clock.calls["compile"] - compiled_before

    imported = time.perf_counter() - _BEGUN
    begun = time.perf_counter()
    with clock.running("first step"):
        total, kernels = train(steps, hidden)
    parts = {part: clock.seconds(part) for part in PARTS}
    parts["trace"] -= parts["compiler"]
    rest = total - clock.seconds(*PARTS)
    timeline = [(part, begin - begun, end - begun, *others) for part, begin, end, *others in clock.intervals]
    later = []
    if name == "LIF" and others:
        shapes = [(t, hidden) for t in (1, 7, 512) if t != steps]
        shapes += [(steps, size) for size in (hidden - 16, hidden // 2 + 1, hidden // 50, 8 * hidden, 64 * hidden)]
        later = [(t, size, *train(t, size)) for t, size in shapes if t * size <= LARGEST]
    return {
        "import": imported,
        "parts": parts,
        "rest": rest,
        "total": total,
        "kernels": kernels,
        "later": later,
        "timeline": timeline,
    }


def measure(layer: str, folder: Path, device: str, bytecode: Path | None, *, others: bool = False) -> dict[str, Any]:
    variables = {"TRITON_CACHE_DIR": "triton", "FLEXSN_CACHE_DIR": "flexsn", "CUDA_CACHE_PATH": "cuda"}
    caches = {variable: str(folder / name) for variable, name in variables.items()}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode or folder / "none")
    if bytecode is None:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    run = subprocess.run(
        [sys.executable, __file__, "--worker", "--layers", layer, "--device", device, *["--others"] * others],
        env={**environment, **caches},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def format_cells(layer: str, caches: str, result: dict[str, Any]) -> list[str]:
    seconds = [result["import"], *(result["parts"][part] for part in PARTS), result["rest"], result["total"]]
    limit = LIMIT_OF_LIF if layer.startswith("LIF") else LIMIT
    return [layer, caches, *(f"{value:.2f}" for value in seconds), f"{limit:g}", str(result["kernels"])]


def format_timeline(layer: str, caches: str, result: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a timeline."""
    yield f"{layer}, {caches}, {result['total']:.2f} s"
    for part, begin, end, thread, kernel in sorted(result["timeline"], key=lambda interval: interval[1]):
        if end - begin >= 0.005:
            yield f"  {begin:7.3f} {end:7.3f}  {end - begin:6.3f}  {thread[-16:]:16}  {part} {kernel}"


def make_page(device: torch.device, rows: list[list[str]], later: list[list[str]]) -> list[str]:
    return [
        "# First training step",
        "",
        "`python benchmarks/first_step.py`: seconds in new processes, with empty and with full caches on the disk.",
        describe_machine(device),
        "",
        *table(HEADER, rows),
        "",
        "Later calls in the processes with empty caches, with another T or another size of the step:",
        "",
        *table(["after", "T x NCL", "seconds", "kernels compiled"], later),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "first_step.md")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), metavar="NAME:TxBxH")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to try this script out")
    parser.add_argument("--no-bytecode", nargs="*", default=[], metavar="NAME:TxBxH")
    parser.add_argument("--bytecode", type=Path, help="folder for the bytecode, which several runs can share")
    parser.add_argument("--timeline", type=Path, help="file for the parts, in the order in which they begin")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.worker:
        print(json.dumps(run_worker(options.layers[0], device, others=options.others)))
        return
    rows, later = list[list[str]](), list[list[str]]()

    def add_result(layer: str, caches: str, result: dict[str, Any]) -> None:
        rows.append(format_cells(layer, caches, result))
        print(*rows[-1], flush=True)
        for t, size, seconds, kernels in result["later"]:
            later.append([layer, f"{t} x {size}", f"{seconds:.3f}", str(kernels)])
        options.output.write_text("\n".join(make_page(device, rows, later)) + "\n")  # the run may be stopped
        if options.timeline is not None:
            with options.timeline.open("a") as file:
                file.writelines(f"{line}\n" for line in format_timeline(layer, caches, result))

    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        bytecode = options.bytecode or top / "bytecode"
        measure(options.layers[0], top / "before", options.device, bytecode)  # compiles the bytecode
        for number, layer in enumerate(options.layers):
            for caches in ("empty", "full"):
                others = caches == "empty"
                add_result(layer, caches, measure(layer, top / str(number), options.device, bytecode, others=others))
        for number, layer in enumerate(options.no_bytecode):
            for caches in ("empty", "full"):
                result = measure(layer, top / f"none{number}", options.device, None)
                add_result(layer, f"{caches}, no bytecode", result)
    publish(make_page(device, rows, later), options.output)


if __name__ == "__main__":
    main()
