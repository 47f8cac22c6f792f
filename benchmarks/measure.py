"""Tools of the benchmarks: timing, the copy floor, processes that compile, and tables with the device and versions."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
import triton

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


def milliseconds(function: Callable[[], object], device: torch.device, *, warmup: int = 10, rep: int = 60) -> float:
    """Returns the median time of a call in ms, measured with CUDA events on a GPU, and with Python's clock on a CPU.

    Args:
        warmup, rep: durations of the warm-up and of the measurement on a GPU, in ms.
    """
    if device.type == "cuda":
        return float(triton.testing.do_bench(function, warmup=warmup, rep=rep, return_mode="median"))
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def copy_floor(elements: int, streams: int, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Returns the time in ms of a copy whose reads and writes together move `streams` tensors of `elements`."""
    source = torch.empty(elements * streams // 2, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), device)


def capture_graph(function: Callable[[], object]) -> Callable[[], None]:
    """Captures `function` in a CUDA graph, and returns a function that replays the graph. This needs a GPU."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles kernels, and fills the pool of the allocator
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def issue_time(function: Callable[[], object], device: torch.device, *, calls: int = 20) -> float:
    """Returns the milliseconds that the CPU needs to issue a call, without waiting for the GPU."""
    function()
    return 1e3 * time_calls(function, calls, device)[1] / calls


def time_calls(function: Callable[[], object], calls: int, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of `calls` calls, with one synchronisation after the last call, and the seconds that the CPU
    needed to issue the calls.
    """
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    issued = time.perf_counter() - begun
    synchronize(device)
    return time.perf_counter() - begun, issued


def kernel_time(function: Callable[[], object], calls: int) -> tuple[float, float]:
    """Returns the microseconds of GPU time per call, and the number of kernels per call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    return sum(e.self_device_time_total for e in events) / calls, sum(e.count for e in events) / calls


def run_in_processes(function: Callable[[_Case], _Result], cases: Sequence[_Case]) -> list[_Result]:
    """Calls the function with each case, in new processes that run in parallel, and returns the results. Kernels that
    these processes compile stay in the caches on disk.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1, 12), mp_context=spawn) as pool:
        return list(pool.map(function, cases))


def describe_machine(device: torch.device) -> str:
    """Returns a text that names the device, the versions of torch, Triton and Python, and the date."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    name += ", Triton's interpreter" if interpreted else ""
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}"
    return f"{name}, {versions}, {time.strftime('%Y-%m-%d')}."


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def publish(lines: Iterable[str], path: Path) -> None:
    """Writes the lines to a file, and prints them."""
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
