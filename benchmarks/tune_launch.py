"""Times launch configurations of a scan, to fill the tables in flexsn_runtime/_buckets.py.

    python benchmarks/tune_launch.py [--model MODEL] [--dtype bfloat16] [SHAPE ...]        e.g. 32x1600000 1024x8192

Per shape and direction, the fastest configurations, as ratios to a copy of the bytes that the direction moves at
least: for LIF, forward 2 streams (read x, write s), backward 3 (read grad_s, read x, write grad_x).
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from measure import copy_floor, milliseconds
from scan_models import MODELS, Model, Work
from triton import OutOfResources

from flexsn_runtime import LaunchConfig, ScanProgram, prepare
from flexsn_runtime._backward import Cotangents
from flexsn_runtime._buckets import LaunchPlan
from flexsn_runtime._forward import ForwardResult
from flexsn_runtime._scan import run_backward, run_forward

SHOWN = 5
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
    """A scan under one configuration: the three launches that are timed."""

    def __init__(self, work: Work, config: LaunchConfig) -> None:
        self.config = config
        plan = LaunchPlan(config, config, config)
        neuron = work.neuron
        program = ScanProgram(neuron.core, neuron.num_inputs, neuron.num_states, neuron.num_outputs)
        self._step, self._arguments = prepare(program, [x.detach() for x in work.inputs])
        self._step.plan = lambda ncl: plan  # type: ignore[method-assign]
        self._cotangents = Cotangents(tuple(work.grads), (None,) * neuron.num_states, state_seqs=False)
        # Of the inputs and what is captured, not of the initial states.
        self._wanted = [
            *(True for _ in self._arguments.inputs),
            *(False for _ in self._arguments.states),
            *(True for _ in self._arguments.lifted),
        ]
        self._kept = self.forward().checkpoints
        self.backward()
        self.infer()

    def infer(self) -> ForwardResult:
        return run_forward(self._step, self._arguments, state_seqs=False, checkpoints=False)

    def forward(self) -> ForwardResult:
        return run_forward(self._step, self._arguments, state_seqs=False, checkpoints=True)

    def backward(self) -> object:
        return run_backward(self._step, self._arguments, self._kept, self._cotangents, self._wanted)


def attempt(work: Work, config: LaunchConfig) -> Candidate | None:
    """`None`: the GPU has not enough shared memory for it."""
    try:
        return Candidate(work, config)
    except OutOfResources:
        return None


def main(model: Model, shapes: list[str], dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    forward, training = model.inference_streams, model.training_streams
    for shape in shapes:
        num_steps, ncl = map(int, shape.split("x"))
        work = Work(model, num_steps, ncl, device, dtype)
        with ThreadPoolExecutor(12) as pool:  # compiling
            attempts = pool.map(lambda config: attempt(work, config), candidates(ncl, dtype.itemsize))  # noqa: B023
        tried = [candidate for candidate in attempts if candidate is not None]
        for what, streams in {"infer": forward, "forward": forward, "backward": training - forward}.items():
            floor = copy_floor(num_steps * ncl, streams, device, dtype)
            print(f"{shape} {what}: copy {floor:.4f} ms")
            timed = [(milliseconds(getattr(candidate, what), device), candidate.config) for candidate in tried]
            for time, config in sorted(timed, key=lambda row: row[0])[:SHOWN]:
                print(f"  {time:.4f} ms  {time / floor:.2f}  {config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--model", default="LIF", choices=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    main(MODELS[given.model], list(given.shapes), getattr(torch, given.dtype))
