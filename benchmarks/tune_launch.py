"""Times launch configurations of the LIF scan, to fill the table in flexsn_runtime/_buckets.py.

    python benchmarks/tune_launch.py [--dtype bfloat16] [SHAPE ...]        e.g. 32x1600000 1024x8192

Per shape and direction, the fastest configurations, as ratios to a copy of the bytes that the direction moves at
least: forward 2 streams (read x, write s), backward 3 (read grad_s, read x, write grad_x).
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from measure import copy_floor, milliseconds
from step_functions import lif
from torch import Tensor

from flexsn_runtime import LaunchConfig, ScanProgram, prepare
from flexsn_runtime._backward import Cotangents
from flexsn_runtime._buckets import LaunchPlan
from flexsn_runtime._forward import ForwardResult
from flexsn_runtime._scan import run_backward, run_forward

SHOWN = 5
STREAMS = {"infer": 2, "forward": 2, "backward": 3}
SHAPES = ("8x6400000", "32x1600000", "128x524288", "512x32768", "1024x8192")


def candidates(ncl: int, width: int) -> list[LaunchConfig]:
    """`(chunk, block, num_warps, stages)`, for elements of `width` bytes."""
    scale = 4 // width  # whole 16-byte loads
    if ncl <= 2**17:
        grid = [
            *itertools.product((8, 16), (32, 64), (1,), (4, 6, 8)),
            *itertools.product((32,), (32, 64), (1,), (2, 3)),
            *itertools.product((4,), (32,), (1,), (8, 12)),
        ]
    else:
        grid = [
            *itertools.product((2, 4, 8), (512 * scale, 1024 * scale), (4,), (1, 2, 3)),
            *itertools.product((4, 8), (512 * scale, 1024 * scale), (8,), (1, 2)),
            *itertools.product((1, 2), (512 * scale,), (4,), (4, 6)),
            *itertools.product((2, 4), (256 * scale,), (2,), (1, 3)),
        ]
    return [LaunchConfig(*choice) for choice in grid]


class Candidate:
    """The scan of `x` under one configuration: the three launches that are timed."""

    def __init__(self, x: Tensor, gradient: Tensor, config: LaunchConfig) -> None:
        self.config = config
        plan = LaunchPlan(config, config, config)
        self._step, self._arguments = prepare(ScanProgram(lif, 1, 1, 1), (x,))
        self._step.plan = lambda ncl: plan  # type: ignore[method-assign]
        self._cotangents = Cotangents((gradient,), (None,), state_seqs=False)
        self._kept = self.forward().checkpoints
        self.backward()
        self.infer()

    def infer(self) -> ForwardResult:
        return run_forward(self._step, self._arguments, state_seqs=False, checkpoints=False)

    def forward(self) -> ForwardResult:
        return run_forward(self._step, self._arguments, state_seqs=False, checkpoints=True)

    def backward(self) -> object:
        return run_backward(self._step, self._arguments, self._kept, self._cotangents, [True, False])


def main(shapes: list[str], dtype: torch.dtype) -> None:
    for shape in shapes:
        num_steps, ncl = map(int, shape.split("x"))
        x = (torch.randn(num_steps, ncl, device="cuda") + 0.5).to(dtype)
        gradient = torch.randn_like(x)
        floors = {what: copy_floor(x.numel(), streams, x.device, dtype) for what, streams in STREAMS.items()}
        with ThreadPoolExecutor(12) as pool:  # compiling
            tried = list(pool.map(lambda config: Candidate(x, gradient, config), candidates(ncl, x.element_size())))  # noqa: B023
        for what, floor in floors.items():
            print(f"{shape} {what}: copy {floor:.4f} ms")
            timed = [(milliseconds(getattr(candidate, what), x.device), candidate.config) for candidate in tried]
            for time, config in sorted(timed, key=lambda row: row[0])[:SHOWN]:
                print(f"  {time:.4f} ms  {time / floor:.2f}  {config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    main(list(given.shapes), getattr(torch, given.dtype))
