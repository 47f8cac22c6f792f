"""Times launch configurations of the LIF scan, to fill the table in flexsn_runtime/_buckets.py.

    python benchmarks/tune_launch.py [SHAPE ...]        e.g. 32x1600000 1024x8192

Per shape and direction, the fastest configurations, as ratios to a copy of the bytes that the direction moves at
least: forward 2 streams (read x, write s), backward 3 (read grad_s, read x, write grad_x).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from neurons import lif
from torch import Tensor

from flexsn_runtime import LaunchConfig, ScanProgram, _buckets, prepare
from flexsn_runtime._buckets import LaunchPlan
from flexsn_runtime._scan import Cotangents, ForwardResult, run_backward, run_forward

SHAPES = ("8x6400000", "32x1600000", "128x524288", "512x32768", "1024x8192")


def milliseconds(function: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median"))


def copy_floor(x: Tensor, streams: int) -> float:
    source = torch.empty(x.numel() * streams // 2, device=x.device)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def use(config: LaunchConfig) -> None:
    """Makes `config` the choice for every size, forward and backward."""
    plan = LaunchPlan(config, config, replace(config, prefetch=False))
    _buckets._PLANS = (plan,) * 5


def candidates(ncl: int) -> list[LaunchConfig]:
    """`(chunk, block, num_warps, prefetch)`."""
    if ncl <= 2**17:
        grid = [*itertools.product((8, 16, 32), (32, 64), (1,), (False, True))]
    else:
        grid = [
            *itertools.product((4, 8), (512, 1024), (4, 8), (False,)),
            *itertools.product((2, 16), (256, 512), (4,), (False,)),
            (8, 256, 2, False),
            (4, 512, 4, True),
            (2, 1024, 4, True),
            (4, 2048, 8, False),
        ]
    return [LaunchConfig(*choice) for choice in grid]


Timed = list[tuple[float, LaunchConfig]]


def measure(x: Tensor, config: LaunchConfig, rows: dict[str, Timed]) -> None:
    use(config)
    step, arguments = prepare(ScanProgram(lif, 1, 1, 1), (x,))
    cotangents = Cotangents((torch.randn_like(x),), (None,), (None,))

    def forward(checkpoints: bool) -> ForwardResult:
        return run_forward(step, arguments, state_seqs=False, checkpoints=checkpoints)

    rows["infer"].append((milliseconds(lambda: forward(False)), config))
    rows["forward"].append((milliseconds(lambda: forward(True)), config))
    if not config.prefetch:
        kept = forward(True).checkpoints
        run = milliseconds(lambda: run_backward(step, arguments, kept, cotangents, [True, False]))
        rows["backward"].append((run, config))


def main(shapes: list[str]) -> None:
    for shape in shapes:
        num_steps, ncl = map(int, shape.split("x"))
        x = torch.randn(num_steps, ncl, device="cuda") + 0.5
        floors = {"infer": copy_floor(x, 2), "forward": copy_floor(x, 2), "backward": copy_floor(x, 3)}
        rows: dict[str, Timed] = {what: [] for what in floors}
        for config in candidates(ncl):
            measure(x, config, rows)
        for what, timed in rows.items():
            print(f"{shape} {what}: copy {floors[what]:.4f} ms")
            for time, config in sorted(timed, key=lambda row: row[0])[:4]:
                print(f"  {time:.4f} ms  {time / floors[what]:.2f}  {config}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHAPES))
