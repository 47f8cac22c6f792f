"""Divisions of recurrent loops among thread-block clusters: microseconds a step of each, forward and backward apart.

    python benchmarks/cluster_divisions.py [--output FILE] [--seconds 80] [--only RLIF ...] [--shapes 250x128x256 ...]

A shape is T x batch x neurons. A figure is the median time of one launch, divided by its steps; the forward is that of
training. All kernels of a loop are compiled first, in parallel processes. `differs` compares what a kernel stores with
launches step by step: the share of other spikes in a forward, and the largest difference in a backward, of the largest
value. It needs a GPU with clusters.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from clusters import DEVICE, OURS
from measure import milliseconds, publish, table, where
from recurrence import training
from torch import Tensor

from flexsn_codegen.errors import CompilationError
from flexsn_codegen.recurrent import Loop, NotOneLaunchError
from flexsn_codegen.targets.cuda import Cluster
from flexsn_codegen.targets.cuda._nvrtc import cubin
from flexsn_graph import Role
from flexsn_runtime import RecurrentSpecialization
from flexsn_runtime.recurrent import _one_launch, _staged_autograd
from flexsn_runtime.recurrent._clusters import matrix_registers
from flexsn_runtime.recurrent._one_launch import InClusters, Memory, in_cluster
from flexsn_runtime.recurrent._over_time import OverTime

SHAPES = ("250x128x256", "250x256x512", "250x128x1024")
_MOST_REGISTERS = 208  # of the matrices in a thread


class Caught:
    """A loop whose launch is stopped, with all that launches it in another way.

    Attributes:
        started: what states are before the loop, since launches overwrite it.
    """

    def __init__(self, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory) -> None:
        self.step, self.over, self.loop, self.memory = step, over, loop, memory
        states = (rows.memory for port, rows in over.reads.items() if port.role in (Role.STATE, Role.GRAD_STATE))
        self.started = [(one, one.clone()) for one in states if one.shape[0] == 2]
        self.expected: list[Tensor] = []

    def stored(self) -> list[Tensor]:
        """Values that the loop has written at every step."""
        return [self.over.writes[view.source].memory for view, _ in self.memory.stores]

    def divisions(self, processors: int) -> Iterator[Cluster]:
        """Those of at most two blocks for a processor, and of work for half of the processors at least."""
        for row_tiles in (1, 2, 4):
            for blocks in (4, 8, 16):
                used = blocks * -(-self.loop.num_rows // (8 * row_tiles))
                for splits in (1, 2, 4, 8):
                    cluster = Cluster(blocks, splits, row_tiles)
                    if processors / 2 <= used + blocks and used <= 2 * processors and self._fits(cluster):
                        yield cluster

    def _fits(self, cluster: Cluster) -> bool:
        threads, tiles = cluster.threads(self.loop.width), cluster.tiles(self.loop.width) * cluster.blocks
        registers = matrix_registers(self.loop, cluster)
        room = min(255, 65536 // threads) if threads <= 1024 else 0
        return tiles % cluster.splits == 0 and 24 <= registers <= min(room - 40, _MOST_REGISTERS)


def caught(name: str, shape: str, dtype: torch.dtype) -> dict[str, Caught]:
    """The loops of a training step, by direction."""
    found: dict[str, Caught] = {}

    def stop(step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory) -> NoReturn:
        found[over.direction] = Caught(step, over, loop, memory)
        raise NotOneLaunchError("its divisions are measured")

    steps, batch, hidden = map(int, shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(steps, batch, hidden, device=DEVICE).to(dtype)
    layer = OURS[name](hidden).to(DEVICE, dtype)
    usual: tuple[Any, Any] = (_one_launch._in_clusters, _staged_autograd._compiles)
    _one_launch._in_clusters, _staged_autograd._compiles = stop, lambda step: False
    try:
        training(layer, x, torch.randn_like(x))()
    finally:
        _one_launch._in_clusters, _staged_autograd._compiles = usual
    torch.cuda.synchronize()
    for one in found.values():
        one.expected = [value.clone() for value in one.stored()]
    return found


def differs(one: Caught) -> str:
    """How far what is stored is from what launches step by step stored."""
    if one.over.backwards:
        pairs = zip(one.stored(), one.expected, strict=True)
        return f"{max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-20)) for a, b in pairs):.1e}"
    spikes = [(a, b) for a, b in zip(one.stored(), one.expected, strict=True) if bool(((b == 0) | (b == 1)).all())]
    return f"{max((float((a != b).float().mean()) for a, b in spikes), default=float('nan')):.1e}"


def measured(one: Caught, launch: InClusters) -> list[str]:
    function = launch.compile(one.over)
    for memory, before in one.started:
        memory.copy_(before)
    launch.run(one.over)
    torch.cuda.synchronize()
    how_far = differs(one)
    time_of = milliseconds(lambda: launch.run(one.over), DEVICE, warmup=2, rep=8)
    turns = "?" if function.at_once is None else -(-launch.groups // max(1, function.at_once))
    return [
        f"{1e3 * time_of / one.over.num_steps:.2f}",
        str(turns),
        f"{function.registers}, {function.spilled}",
        how_far,
    ]


def compiled(text: str, capability: tuple[int, int]) -> None:
    """Compiles a kernel into the cache on the disk."""
    with contextlib.suppress(CompilationError):
        cubin(text, capability)


def main(only: list[str], shapes: list[str], seconds: float, path: Path) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    work: list[tuple[list[str], Caught, Cluster, InClusters]] = []
    for name in only:
        for shape in shapes:
            for dtype in (torch.float32, torch.bfloat16):
                kind = str(dtype).removeprefix("torch.")
                try:
                    loops = caught(name, shape, dtype)
                except Exception as error:
                    missing.append(f"{name}, {shape}, {kind}: {str(error).splitlines()[0][:160]}")
                    continue
                for direction, one in loops.items():
                    for cluster in one.divisions(processors):
                        try:
                            launch = in_cluster(one.step, one.over, one.loop, one.memory, cluster)
                        except NotOneLaunchError as error:
                            missing.append(f"{name}, {shape}, {kind}, {direction}: {error}")
                            break
                        work.append(([name, shape, kind, direction], one, cluster, launch))
    print(f"{len(work)} kernels after {time.perf_counter() - begun:.0f} s", flush=True)
    texts = list(dict.fromkeys(launch.kernel.text(launch.tensors(one.over)) for _, one, _, launch in work))
    workers = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=workers) as pool:
        capability = torch.cuda.get_device_capability(DEVICE)
        list(pool.map(compiled, texts, [capability] * len(texts)))
    print(f"{len(texts)} compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    for labels, one, cluster, launch in work:
        if time.perf_counter() - begun > seconds:
            missing.append(f"{', '.join(labels)}, {cluster}: no time was left")
            continue
        division = f"{cluster.blocks} x {cluster.splits}, {cluster.row_tiles}"
        try:
            rows.append([*labels, division, *measured(one, launch)])
        except Exception as error:  # a division that has no room
            rows.append([*labels, division, str(error).splitlines()[0][:60], "", "", ""])
        print(rows[-1], flush=True)
    columns = ["layer", "T x B x H", "dtype", "direction", "blocks x splits, row tiles"]
    lines = [
        "# Divisions of recurrent loops among clusters",
        "",
        f"`python benchmarks/cluster_divisions.py`. {where(DEVICE)}",
        "",
        *table([*columns, "µs a step", "turns", "registers, bytes spilled", "differs"], rows),
        "",
        *(f"- not measured: {what}" for what in missing),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cluster_divisions.md")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--only", nargs="*", default=["RLIF"], choices=list(OURS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    main(options.only, options.shapes, options.seconds, options.output)
