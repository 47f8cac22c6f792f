"""Times of calls with very little computation: LIF with T x batch x features = 4 x 64 x 128, on a GPU.

    python benchmarks/scan_overhead.py [--output FILE] [--profile]

A run has many calls and one synchronisation after the last call. `call` is the wall time of a run divided by the number
of its calls, in the fastest of several runs. The runs of all rows alternate. `issue` is the CPU time of a call, without
waiting for the GPU. `graph` is the time of a replay of the same call in a CUDA graph. It is never shorter than the time
that the CPU needs to launch a graph. `of 20` is the time per call in a graph of 20 calls, such as the graph of a
network with 20 layers. `kernels` is the time of the kernels of a call, from the profiler. Rows with `one thread` run
the backward in the calling thread (`torch.autograd.set_multithreading_enabled(False)`), so that there is no switch to
autograd's thread and back. The compiled launcher launches training steps, except in rows with `by Python`.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import capture_graph, describe_machine, kernel_time, publish, synchronize, table, time_calls
from scan_models import MODELS, Work
from step_functions import lif
from torch import Tensor, nn

from flexsn_nn import FlexSNKernel

STEPS, BATCH, FEATURES = 4, 64, 128
LIMITS = {"inference": 30.0, "training step": 150.0}
GRAPH_LIMIT = 1.3
TOGETHER = 20
REPEATS = 5
Call = Callable[[], object]


def measure_function(function: Call, calls: int, device: torch.device) -> tuple[float, float]:
    """Returns the wall time of a call and the CPU time to issue the call, each as the minimum of several runs."""
    return measure_functions([function], calls, device)[0]


def measure_functions(functions: Sequence[Call], calls: int, device: torch.device) -> list[tuple[float, float]]:
    """Returns the times of `microseconds` for several functions, whose runs alternate, so that slow periods of a host
    affect all functions.
    """
    best = [(float("inf"), float("inf"))] * len(functions)
    for _ in range(REPEATS):
        for i, function in enumerate(functions):
            for _ in range(10):
                function()
            wall, issued = time_calls(function, calls, device)
            best[i] = min(best[i][0], wall), min(best[i][1], issued)
    return [(1e6 * wall / calls, 1e6 * issued / calls) for wall, issued in best]


def make_calls(device: torch.device) -> list[tuple[str, str, Call]]:
    """Returns the name of an implementation, the name of its work, and the function to call, for each row."""
    model, by_python = (Work(MODELS["LIF"], STEPS, BATCH * FEATURES, device) for _ in range(2))
    kernel = FlexSNKernel(lif, 1, 1, 1)
    x = torch.randn(STEPS, BATCH, FEATURES, device=device)
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    v = torch.zeros(BATCH, FEATURES, device=device)

    def kernel_train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kernel(leaf, v)[0], leaf, grad)

    relu = nn.ReLU()  # a module, because the neuron is also a module

    def relu_train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(relu(leaf), leaf, grad)

    def relu_infer() -> Tensor:
        with torch.no_grad():
            result: Tensor = relu(x)
            return result

    # After some calls, the chosen launcher runs a repeated call.
    for choice, begin in (("compiled", (model.train, model.infer, kernel_train)), ("python", (by_python.train,))):
        os.environ["FLEXSN_LAUNCHER"] = choice
        for call in begin * 3:
            call()
    return [
        ("FlexSN", "inference", model.infer),
        ("FlexSN", "training step", model.train),
        ("FlexSN", "training step, by Python", by_python.train),
        ("FlexSN", "training step, one thread", run_in_this_thread(model.train)),
        ("FlexSN", "training step, one thread, by Python", run_in_this_thread(by_python.train)),
        ("FlexSNKernel", "inference", lambda: kernel(x, v)),
        ("FlexSNKernel", "training step", kernel_train),
        ("add_", "", lambda: x.add_(1.0)),
        ("relu", "inference", relu_infer),
        ("relu", "training step", relu_train),
        ("relu", "training step, one thread", run_in_this_thread(relu_train)),
    ]


def run_in_this_thread(call: Call) -> Call:
    """Returns a function that runs `call`, with backward passes in the calling thread."""

    def run() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return run


def measure_cells(
    name: str, work_name: str, call: Call, eager: tuple[float, float], calls: int, device: torch.device
) -> list[str]:
    wall, issue = eager
    row = [name, work_name, f"{wall:.1f}", f"{issue:.1f}", str(LIMITS.get(work_name, "")) if "FlexSN" in name else ""]
    if device.type != "cuda":
        return [*row, *[""] * 6]
    try:
        replay = capture_graph(call)
        replay_many = capture_graph(lambda: [call() for _ in range(TOGETHER)])
    except RuntimeError as error:
        return [*row, f"capture failed: {str(error).splitlines()[0]}", *[""] * 5]
    replay_us, _ = measure_function(replay, calls, device)
    us_in_graph = measure_function(replay_many, max(calls // TOGETHER, 1), device)[0] / TOGETHER
    kernel_us, count = kernel_time(replay, calls)
    ratios = [f"{replay_us / kernel_us:.2f}", f"{us_in_graph / kernel_us:.2f}"]
    return [*row, f"{replay_us:.1f}", f"{us_in_graph:.1f}", f"{kernel_us:.1f}", f"{count:.0f}", *ratios]


def profile_call(call: Call, calls: int, device: torch.device, shown: int = 25) -> str:
    """Returns a profile of the Python functions of a call.

    The profiler slows down the call, and does not cover autograd's thread.
    """
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    synchronize(device)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(shown)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_overhead.md")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--profile", action="store_true", help="also print a profile of the Python time")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    options = parser.parse_args()
    device = torch.device(options.device)
    calls_of_rows = make_calls(device)
    eager = measure_functions([call for _, _, call in calls_of_rows], options.calls, device)
    rows = [measure_cells(*row, times, options.calls, device) for row, times in zip(calls_of_rows, eager, strict=True)]
    header = ["who", "what", "call", "issue", "at most", "graph", f"of {TOGETHER}", "kernels", "number"]
    header += ["graph / kernels", f"of {TOGETHER} / kernels"]
    lines = [
        f"# Overhead, LIF at {STEPS} x {BATCH} x {FEATURES}, float32",
        "",
        "`python benchmarks/scan_overhead.py`: microseconds per call. `call`: wall time in eager mode. `issue`: its",
        f"CPU time. Both are the minimum of {REPEATS} runs of {options.calls} calls; the runs of the rows alternate.",
        f"`graph`: a replay as a CUDA graph. `of {TOGETHER}`: a call in a graph of {TOGETHER} calls. `kernels`: GPU",
        f"time of a call, with the number of its kernels. Ratios should be at most {GRAPH_LIMIT}. The limits of calls",
        "were set on a machine on which `add_` took 6 us and the training step of relu 52. `one thread`: with",
        "`torch.autograd.set_multithreading_enabled(False)`.",
        describe_machine(device),
        "",
        *table(header, rows),
    ]
    publish(lines, options.output)
    if options.profile:
        for name, work_name, call in (row for row in calls_of_rows if "FlexSN" in row[0]):
            print(f"\n{name}, {work_name}: Python functions by their own time, {options.calls} calls\n")
            print(profile_call(call, options.calls, device))


if __name__ == "__main__":
    main()
