"""Divisions of recurrent loops among the blocks of thread-block clusters: microseconds per step, for forward and
backward separately.

    python benchmarks/cluster_divisions.py [--output FILE] [--seconds 80] [--only RLIF ...] [--shapes 250x128x256 ...]
        [--dtypes float32 bfloat16] [--divisions 8x2x3 ...] [--tiles] [--lock FILE] [--together 1]

A shape is T x batch x neurons. A figure is the median time of one launch, divided by its number of steps. The forward
is the forward of a training step. All kernels of a loop are compiled first, in parallel. `differs` compares the values
that a kernel stores with the values that launches step by step store. The column shows the fraction of spikes that
differ or, for real numbers, the largest difference relative to the largest value. `--divisions` selects the divisions
to measure. For example, `8x2x3` means 8 blocks, 2 splits and 3 tiles of rows. With `--tiles`, the script compares
divisions among programs without clusters instead. If several processes have the same `--lock`, only one of them
measures at a time, after `--together` processes have compiled their kernels. The script needs a GPU that supports
clusters.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from clusters import DEVICE, OURS, measure_alone
from measure import describe_machine, milliseconds, publish, table
from recurrence import make_training_step
from torch import Tensor

from flexsn_codegen.errors import CompilationError
from flexsn_codegen.recurrent import Loop, NotOneLaunchError
from flexsn_codegen.targets.cuda import Cluster, cluster_needs
from flexsn_codegen.targets.triton._recurrent import Tiles
from flexsn_graph import Role
from flexsn_runtime import RecurrentSpecialization
from flexsn_runtime.recurrent import _one_launch, _staged_autograd
from flexsn_runtime.recurrent._clusters import division as fitted
from flexsn_runtime.recurrent._clusters import turns
from flexsn_runtime.recurrent._one_launch import InClusters, InPrograms, Memory, in_cluster, in_programs
from flexsn_runtime.recurrent._over_time import OverTime

SHAPES = ("250x128x256", "250x256x512", "250x128x1024")


class CaughtLoop:
    """A loop whose launch was intercepted, with the arguments for launching the loop with other divisions.

    Attributes:
        started: copy of the states before the loop, because launches overwrite them.
    """

    def __init__(self, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory) -> None:
        self.step, self.over, self.loop, self.memory = step, over, loop, memory
        states = (rows.memory for port, rows in over.reads.items() if port.role in (Role.STATE, Role.GRAD_STATE))
        self.started = [(state, state.clone()) for state in states if state.shape[0] == 2]
        self.expected: list[Tensor] = []

    def list_stored(self) -> list[Tensor]:
        """Returns the values that the loop writes in each step."""
        return [self.over.writes[view.source].memory for view, _ in self.memory.stores]

    def find_divisions(self, divisions: list[str]) -> Iterator[Cluster]:
        """Yields the clusters of the named divisions that fit on the device."""
        for text in divisions:
            blocks, splits, row_tiles = map(int, text.split("x"))
            cluster = fitted(self.loop, Cluster(blocks, splits, row_tiles), from_zero=self.over.from_zero)
            if cluster is not None:
                yield cluster

    def list_divisions(self, processors: int) -> Iterator[Cluster]:
        """Yields divisions among the blocks of clusters.

        For each number of blocks, the method selects the divisions with the fewest passes. Of these, it yields the
        divisions with the fewest row tiles, or with one more row tile. A warp holds at least a quarter of its terms in
        registers.
        """
        loop, from_zero = self.loop, self.over.from_zero
        for blocks in (4, 8, 16):
            clusters_by_passes: dict[int, list[Cluster]] = {}
            for row_tiles in (1, 2, 3, 4):
                for splits in (1, 2, 4, 8):
                    cluster = fitted(loop, Cluster(blocks, splits, row_tiles), from_zero=from_zero)
                    if cluster is not None:
                        terms = cluster_needs(loop, cluster, from_zero=from_zero).terms
                        if 4 * cluster.held_of(terms) >= terms:
                            clusters_by_passes.setdefault(
                                turns(loop, cluster, processors, from_zero=from_zero), []
                            ).append(cluster)
            if clusters_by_passes and min(clusters_by_passes) <= 2:
                best = clusters_by_passes[min(clusters_by_passes)]
                yield from (cluster for cluster in best if cluster.row_tiles <= best[0].row_tiles + 1)

    def list_tiles(self) -> Iterator[Tiles]:
        """Yields divisions among programs that exchange values through global memory and fill most of an H100."""
        loop = self.loop
        element_size = 6 if any(exchange.dtype == torch.float32 for exchange in loop.exchanges) else 2
        for rows, columns in itertools.product((16, 32, 64), (16, 32, 64)):
            count = -(-loop.width // columns)
            if 100 <= count * -(-loop.num_rows // rows) <= 132 and columns * loop.width * element_size <= 220 << 10:
                for chunk, num_warps, ahead in ((128, 4, 1), (128, 8, 1), (256, 8, 1), (64, 8, 1), (128, 8, 4)):
                    yield Tiles(rows, count, chunk, num_warps, ahead)


def catch_loops(name: str, shape: str, dtype: torch.dtype) -> dict[str, CaughtLoop]:
    """Returns the loops of a training step, by direction."""
    loops: dict[str, CaughtLoop] = {}

    def stop(step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory) -> NoReturn:
        loops[over.direction] = CaughtLoop(step, over, loop, memory)
        raise NotOneLaunchError("its divisions are measured")

    steps, batch, hidden = map(int, shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(steps, batch, hidden, device=DEVICE).to(dtype)
    layer = OURS[name](hidden).to(DEVICE, dtype)
    originals: tuple[Any, Any] = (_one_launch._prepare_in_clusters, _staged_autograd._needs_compilation)
    _one_launch._prepare_in_clusters, _staged_autograd._needs_compilation = stop, lambda step: False
    try:
        make_training_step(layer, x, torch.randn_like(x))()
    finally:
        _one_launch._prepare_in_clusters, _staged_autograd._needs_compilation = originals
    torch.cuda.synchronize()
    for caught_loop in loops.values():
        caught_loop.expected = [value.clone() for value in caught_loop.list_stored()]
    return loops


@torch.no_grad()
def measure_difference(caught_loop: CaughtLoop) -> str:
    """Returns the difference between the stored values and the values that launches step by step store."""
    pairs = list(zip(caught_loop.list_stored(), caught_loop.expected, strict=True))
    spikes = [] if caught_loop.over.backwards else [(a, b) for a, b in pairs if bool(((b == 0) | (b == 1)).all())]
    if spikes:
        return f"{max(float((a != b).float().mean()) for a, b in spikes):.1e}"
    return f"{max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-20)) for a, b in pairs):.1e}"


def measure_launch(caught_loop: CaughtLoop, launch: InClusters | InPrograms) -> list[str]:
    if isinstance(launch, InClusters):
        function = launch.compile(caught_loop.over)
        at_once, registers = function.at_once, f"{function.registers}, {function.spilled}"
    else:
        room, registers = launch.room(caught_loop.over), ""
        at_once = room // launch.tiles.count
        if not at_once:
            raise CompilationError(f"room for {room} programs")
    for memory, before in caught_loop.started:
        memory.copy_(before)
    launch.run(caught_loop.over)
    torch.cuda.synchronize()
    difference = measure_difference(caught_loop)
    ms = milliseconds(lambda: launch.run(caught_loop.over), DEVICE, warmup=2, rep=8)
    in_turn = "?" if at_once is None else -(-launch.groups // max(1, at_once))
    return [f"{1e3 * ms / caught_loop.over.num_steps:.2f}", str(in_turn), registers, difference]


def describe(division: Cluster | Tiles) -> str:
    if isinstance(division, Tiles):
        return f"{division.rows} rows, {division.count} programs, {division.chunk} terms, {division.num_warps} warps"
    held = "" if division.held is None else f", {division.held} held"
    held += "" if division.stored is None else f", {division.stored} stored"
    held += (", one slot" if division.slots == 1 else "") + (", compact" if division.compact else "")
    return f"{division.blocks} x {division.splits}, {division.row_tiles}{held}"


def main(
    only: list[str],
    shapes: list[str],
    dtypes: list[str],
    seconds: float,
    path: Path,
    lock: Path | None,
    divisions: list[str],
    together: int,
    *,
    tiles: bool,
) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    work: list[tuple[list[str], CaughtLoop, Cluster | Tiles, InClusters | InPrograms]] = []
    for name, shape, dtype_name in itertools.product(only, shapes, dtypes):
        try:
            loops = catch_loops(name, shape, getattr(torch, dtype_name))
        except Exception as error:
            missing.append(f"{name}, {shape}, {dtype_name}: {str(error).splitlines()[0][:160]}")
            continue
        for direction, caught_loop in loops.items():
            candidates: Iterator[Cluster | Tiles] = caught_loop.list_divisions(processors)
            if tiles or divisions:
                candidates = caught_loop.list_tiles() if tiles else caught_loop.find_divisions(divisions)
            for division in candidates:
                arguments = caught_loop.step, caught_loop.over, caught_loop.loop, caught_loop.memory
                try:
                    launch: InClusters | InPrograms
                    if isinstance(division, Tiles):
                        launch = in_programs(*arguments, division)
                    else:
                        launch = in_cluster(*arguments, division)
                except NotOneLaunchError as error:
                    missing.append(f"{name}, {shape}, {dtype_name}, {direction}: {error}")
                    break
                work.append(([name, shape, dtype_name, direction], caught_loop, division, launch))
    print(f"{len(work)} kernels after {time.perf_counter() - begun:.0f} s", flush=True)
    compile_all([(caught_loop, launch) for _, caught_loop, _, launch in work])
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    with measure_alone(lock, together):
        for labels, caught_loop, division, launch in work:
            if time.perf_counter() - begun > seconds:
                missing.append(f"{', '.join(labels)}, {describe(division)}: no time was left")
                continue
            try:
                rows.append([*labels, describe(division), *measure_launch(caught_loop, launch)])
            except Exception as error:  # a division that does not fit on the device
                rows.append([*labels, describe(division), str(error).splitlines()[0][:60], "", "", ""])
            print(rows[-1], flush=True)
    columns = ["layer", "T x B x H", "dtype", "direction", "rows, programs" if tiles else "blocks x splits, row tiles"]
    lines = [
        "# Divisions of recurrent loops among " + ("programs" if tiles else "clusters"),
        "",
        f"`python benchmarks/cluster_divisions.py`. {describe_machine(DEVICE)}",
        "",
        *table([*columns, "µs a step", "turns", "registers, bytes spilled", "differs"], rows),
        "",
        *(f"- not measured: {reason}" for reason in missing),
    ]
    publish(lines, path)


def compile_all(work: list[tuple[CaughtLoop, InClusters | InPrograms]]) -> None:
    """Compiles kernels in threads, because both compilers run outside of Python."""

    def compile_one(caught_loop: CaughtLoop, launch: InClusters | InPrograms) -> None:
        with contextlib.suppress(Exception):  # the measurement will report the error
            if isinstance(launch, InClusters):
                launch.compile(caught_loop.over)
            else:
                launch.room(caught_loop.over)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for caught_loop, launch in work:
            threads.submit(compile_one, caught_loop, launch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cluster_divisions.md")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--only", nargs="*", default=["RLIF"], choices=list(OURS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--divisions", nargs="*", default=[])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--together", type=int, default=1)
    options = parser.parse_args()
    main(
        options.only,
        options.shapes,
        options.dtypes,
        options.seconds,
        options.output,
        options.lock,
        options.divisions,
        options.together,
        tiles=options.tiles,
    )
