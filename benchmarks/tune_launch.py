"""Times of launch configurations of a scan. The tables in flexsn_runtime/plans/_buckets.py come from this script.

    python benchmarks/tune_launch.py [--model MODEL] [--dtype bfloat16] [SHAPE ...]        e.g. 32x1600000 1024x8192

The script prints the fastest configurations for each shape, for inference, forward and backward. It also prints the
ratio of each time to the time of a copy of the bytes that the kernel has to move. For LIF, the forward moves 2 streams
(it reads x and writes s), and the backward moves 3 streams (it reads grad_s and x, and writes grad_x).
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from measure import copy_floor, milliseconds
from scan_models import MODELS, Model, Work

from flexsn_runtime import LaunchConfig, PointwiseProgram, prepare
from flexsn_runtime.plans._buckets import LaunchPlan
from flexsn_runtime.program._autotune import time_of

SHOWN = 5
SHAPES = ("8x6400000", "32x1600000", "128x524288", "512x32768", "1024x8192")


def list_candidates(ncl: int, width: int) -> list[LaunchConfig]:
    """Returns the configurations to measure, for `ncl` elements of `width` bytes."""
    scale = 4 // width  # gives loads the same number of bytes for all widths
    if ncl <= 2**17:
        grid = [
            *itertools.product((8, 16), (32 * scale, 64 * scale), (1,), (2, 3, 4, 5, 6)),
            *itertools.product((8,), (128 * scale,), (2,), (3, 5)),
            *itertools.product((4,), (32 * scale, 64 * scale), (1,), (8, 12)),
        ]
    else:
        grid = [
            *itertools.product((4, 8), (256 * scale, 512 * scale, 1024 * scale), (4,), (1, 2, 3)),
            *itertools.product((4, 8), (512 * scale, 1024 * scale), (8,), (1, 2)),
            *itertools.product((8,), (128 * scale, 256 * scale), (2,), (1, 2, 3)),
            *itertools.product((2,), (512 * scale,), (4,), (1, 4)),
        ]
    return [LaunchConfig(*choice) for choice in grid]


def main(model: Model, shapes: list[str], dtype: torch.dtype, device: torch.device) -> None:
    forward, training = model.inference_streams, model.training_streams
    for shape in shapes:
        num_steps, ncl = map(int, shape.split("x"))
        work = Work(model, num_steps, ncl, device, dtype)
        neuron = work.neuron
        program = PointwiseProgram(neuron.core, neuron.num_inputs, neuron.num_states, neuron.num_outputs)
        step, arguments = prepare(program, [x.detach() for x in work.inputs])
        plans = [LaunchPlan(config, config, config) for config in list_candidates(ncl, dtype.itemsize)]
        for name, streams in {"inference": forward, "forward": forward, "backward": training - forward}.items():
            time = partial(time_of, step, arguments, name=name)
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(partial(time, timer=lambda run: 0.0), plans))  # compiles the kernels
            floor = copy_floor(num_steps * ncl, streams, device, dtype)
            print(f"{shape} {name}: copy {floor:.4f} ms")
            results = [(time(plan, timer=partial(milliseconds, device=device)), plan.forward) for plan in plans]
            for elapsed, config in sorted(results, key=lambda row: row[0])[:SHOWN]:
                print(f"  {elapsed:.4f} ms  {elapsed / floor:.2f}  {config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--model", default="LIF", choices=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    options = parser.parse_args()
    main(MODELS[options.model], list(options.shapes), getattr(torch, options.dtype), torch.device(options.device))
