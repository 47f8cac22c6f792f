"""Times of training steps of spiking networks under `torch.compile`, by the form of the neurons in the compiled graph.

    python benchmarks/compiled_networks.py [--output benchmarks/results/compiled_networks.md]

`operator` is the scan as one operator, which Inductor lowers to kernel launches. `custom op` calls the same kernels in
a `torch.library.custom_op`. `loop` is Inductor's code for the plain loop over time. `eager` launches kernels without a
compiler. A training step is a forward, a weighted sum, and a backward that computes the gradients of the parameters.
`gaps` is the fraction of a step in which the GPU runs nothing: one minus the ratio of the kernels' time (measured with
the profiler) to the time of the step (measured without it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, issue_time, kernel_time, milliseconds, publish, table
from step_functions import lif
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from flexsn_nn import FlexSN
from flexsn_runtime import (
    build_training_kernels,
    flexsn_inductor_training_final_state,
    register_flexsn_kernel_handle,
)

Neuron = Callable[[], nn.Module]


class Scan(nn.Module):
    """A `FlexSN` layer that starts each call from a reset state."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.neuron = FlexSN(lif, 1, 1, 1, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset()
        spikes: Tensor = self.neuron(x)
        return spikes


class CustomOp(nn.Module):
    """A layer that calls the kernels in a custom operator, which a compiler cannot trace into."""

    def __init__(self) -> None:
        super().__init__()
        forward, backward, info = build_training_kernels(lif, 1, 1, 1)
        self.handle = register_flexsn_kernel_handle(
            inference_kernel=None,
            inference_info=None,
            inference_final_state_kernel=None,
            inference_final_state_info=None,
            forward_kernel=forward,
            backward_kernel=backward,
            training_info=info,
        )

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = flexsn_inductor_training_final_state(self.handle, [x])[0]
        return spikes


class Linears(nn.Module):
    """Linear, LIF, Linear, LIF on `[T, B, features]`."""

    def __init__(self, neuron: Neuron, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.neurons = nn.ModuleList([neuron(), neuron()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.neurons[1](3.0 * self.second(self.neurons[0](3.0 * self.first(x))))
        return result


class ConvBlock(nn.Module):
    """Conv-BN-LIF on `[T, B, channels, H, W]`."""

    def __init__(self, neuron: Neuron, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.neuron = neuron()

    def forward(self, x: Tensor) -> Tensor:
        currents = self.bn(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        result: Tensor = self.neuron(currents)
        return result


# By title: the network, and the shape of its input. The last network has so few steps that compilers unroll its loop.
NETWORKS: dict[str, tuple[Callable[[Neuron], nn.Module], tuple[int, ...]]] = {
    "Linear-LIF-Linear-LIF, 4 x 64 x 128": (lambda neuron: Linears(neuron, 128), (4, 64, 128)),
    "Linear-LIF-Linear-LIF, 16 x 256 x 1024": (lambda neuron: Linears(neuron, 1024), (16, 256, 1024)),
    "Conv-BN-LIF, 8 x 32 x 64 x 32 x 32": (lambda neuron: ConvBlock(neuron, 64), (8, 32, 64, 32, 32)),
}
SMALL = {
    "Linear-LIF-Linear-LIF, 2 x 3 x 8": (lambda neuron: Linears(neuron, 8), (2, 3, 8)),
    "Conv-BN-LIF, 2 x 2 x 3 x 4 x 4": (lambda neuron: ConvBlock(neuron, 3), (2, 2, 3, 4, 4)),
}
# By name: the neuron, and the mode of torch.compile, or `None` if the network is not compiled.
WAYS: dict[str, tuple[Neuron, str | None]] = {
    "eager": (lambda: Scan("triton"), None),
    "custom op": (CustomOp, "default"),
    "operator": (lambda: Scan("hop"), "default"),
    "loop": (lambda: Scan("torch"), "default"),
    "operator, CUDA graphs": (lambda: Scan("hop"), "reduce-overhead"),
}


def make_training_step(network: Callable[..., Any], parameters: Sequence[Tensor], x: Tensor) -> Callable[[], object]:
    weight = torch.linspace(-1.0, 1.0, x.numel(), device=x.device).view(x.shape)
    return lambda: torch.autograd.grad((network(x) * weight).sum(), parameters)


def measure_way(
    network: Callable[[Neuron], nn.Module], shape: tuple[int, ...], way: str, device: torch.device
) -> list[str]:
    neuron, mode = WAYS[way]
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = network(neuron).to(device)
    compiled: Any = module if mode is None else torch.compile(module, fullgraph=True, dynamic=False, mode=mode)
    step = make_training_step(compiled, list(module.parameters()), torch.randn(shape, device=device))
    begun = time.perf_counter()
    step()
    if device.type != "cuda":
        return [way, f"{milliseconds(step, device):.3f}", "-", "-", "-", f"{time.perf_counter() - begun:.1f}"]
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    elapsed, issued = milliseconds(step, device), issue_time(step, device)
    # If issuing a step takes longer than running it, the step ends as soon as it is issued.
    elapsed, busy = max(elapsed, issued), kernel_time(step, 10)[0] / 1e3
    gaps = f"{100 * max(0.0, 1.0 - busy / elapsed):.0f} %"
    return [way, f"{elapsed:.3f}", f"{issued:.3f}", f"{busy:.3f}", gaps, f"{first:.1f}"]


def count_graphs(device: torch.device) -> list[list[object]]:
    """Trains with several lengths and batch sizes, with `dynamic=True`. Returns the number of graphs that are compiled
    after each of them.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    module = Linears(lambda: Scan("hop"), 16).to(device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    rows: list[list[object]] = []
    for steps, batch in ((8, 32), (4, 32), (64, 5), (17, 3000)):
        x = torch.randn(steps, batch, 16, device=device)
        make_training_step(compiled, list(module.parameters()), x)()
        rows.append([f"{steps} x {batch}", counter.frame_count])
    return rows


# With this option, Inductor launches user-defined kernels in the same way as its own kernels, and compiles no C code
# for each user-defined kernel.
OWN_LAUNCHER = "TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS"

FUNCTIONS = {
    "LIF": ('Scan("hop")', "0"),
    "LIF, Inductor's launcher": ('Scan("hop")', "1"),
    "relu": ("torch.relu", "0"),
}
LENGTHS = (8, 64, 1024)


def measure_first_step(function: str, own_launcher: str, steps: int, device: torch.device, bytecode: str) -> float:
    """Returns the seconds of the first training step of `0.5 * function(2 x + 0.1)`, in a new process with empty
    caches.

    Args:
        bytecode: folder in which Python stores the bytecode of imported modules.
    """
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from compiled_networks import Scan
function = {function}
network = torch.compile(lambda x: 0.5 * function(2.0 * x + 0.1), fullgraph=True)
x = torch.randn({steps}, 64, 128, device={str(device)!r}, requires_grad=True)
(x * 2.0).sum().backward()  # initializes the device
begun = time.perf_counter()
network(x).sum().backward()
x.grad.sum().item()
print(time.perf_counter() - begun)
"""
    with tempfile.TemporaryDirectory() as empty:
        names = ("TRITON_CACHE_DIR", "FLEXSN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = {**os.environ, **{name: f"{empty}/{name}" for name in names}, OWN_LAUNCHER: own_launcher}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return float(json.loads(run.stdout.splitlines()[-1]))


def measure_first_steps(device: torch.device, processes: int) -> list[list[object]]:
    """Returns the times of first steps, by function and T. Each time is measured in several processes, because times
    of different processes differ by up to a second.

    The processes of the functions alternate, so that slow periods affect all functions. Bytecode exists, as after an
    installation, because Python takes several seconds to compile torch and sympy.
    """
    seconds: dict[tuple[str, int], list[float]] = {(name, steps): [] for steps in LENGTHS for name in FUNCTIONS}
    with tempfile.TemporaryDirectory() as bytecode:
        for function in FUNCTIONS.values():
            measure_first_step(*function, LENGTHS[0], device, bytecode)
        for _ in range(processes):
            for (name, steps), values in seconds.items():
                values.append(measure_first_step(*FUNCTIONS[name], steps, device, bytecode))
    return [
        [name, *(", ".join(f"{value:.2f}" for value in sorted(seconds[name, steps])) for steps in LENGTHS)]
        for name in FUNCTIONS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "compiled_networks.md")
    parser.add_argument("--device", default="cuda", help="cpu runs small sizes, to test this script")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--first-steps", type=int, default=3, help="processes per first step; 0 for none")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    lines = ["# Spiking networks under torch.compile: a training step, float32", ""]
    lines += [
        "`python benchmarks/compiled_networks.py`. The docstring of the script describes the ways. `step`, `issued`",
        "and `kernels` are times in ms: of the whole step, of the part until the CPU has issued it, and of its",
        "kernels. The first step is in s, with existing caches. If `issued` is as long as `step`, the GPU waits for",
        "the CPU. Compiled code needs time for its guards, its autograd node and its single launches. CUDA graphs",
        "avoid this time, but copy the inputs into the memory of the graph.",
        "",
        describe_machine(device),
        "",
    ]
    for title, (network, shape) in (NETWORKS if device.type == "cuda" else SMALL).items():
        rows = [measure_way(network, shape, way, device) for way in options.ways]
        lines += [f"## {title}", "", *table(["way", "step", "issued", "kernels", "gaps", "first, s"], rows), ""]
    lines += ["## Compilations with dynamic shapes", "", "Linear-LIF-Linear-LIF, in this order.", ""]
    lines += [*table(["T x B", "graphs compiled so far"], count_graphs(device)), ""]
    if options.first_steps:
        lines += ["## The first training step in a new process, caches empty", ""]
        lines += [
            "Seconds of `0.5 * f(2 x + 0.1)`. With relu, this is the time of the compiler alone. Inductor's launcher",
            "is the option `static_launch_user_defined_triton_kernels`. Python's bytecode exists, as after an",
            "installation. The processes alternate.",
            "",
        ]
        lines += [
            *table(["f", *(f"T = {steps}" for steps in LENGTHS)], measure_first_steps(device, options.first_steps)),
            "",
        ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
