"""What the benchmarks measure with: a median time, the copy floor, and a heading that says where."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import triton


def milliseconds(function: Callable[[], object], device: torch.device, *, warmup: int = 10, rep: int = 60) -> float:
    """Median time of a call: by CUDA events on a GPU, by the clock elsewhere.

    Args:
        warmup, rep: how long to warm up and to measure, in ms.
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
    """Time of a copy that moves as many bytes as `streams` tensors of `elements`."""
    source = torch.empty(elements * streams // 2, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), device)


def graphed(function: Callable[[], object]) -> Callable[[], None]:
    """`function`, captured in a CUDA graph; a call of the result replays it. Needs a GPU."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets the allocator settle
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def issue_time(function: Callable[[], object], device: torch.device, *, calls: int = 20) -> float:
    """Time in ms that the CPU needs to issue a call, whether or not the GPU has done its work yet."""
    function()
    _synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    issued = time.perf_counter() - begun
    _synchronize(device)
    return 1e3 * issued / calls


def where(device: torch.device) -> str:
    """Device, versions and date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}"
    return f"{name}, {versions}, {time.strftime('%Y-%m-%d')}."


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def publish(lines: Iterable[str], path: Path) -> None:
    """Writes the lines, and prints them."""
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
