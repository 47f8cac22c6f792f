# ruff: noqa
# mypy: ignore-errors
"""Constants of kernels on rows and columns, on a GPU: an experiment."""

from __future__ import annotations

import statistics
import time

import torch
from function_trial import TRIALS, arguments_of, inference, larger, on_gpu, outer, training

from flexsn_codegen import pointwise
from flexsn_codegen.targets.triton import _row_kernel as rk

begun = time.time()
device = torch.device("cuda")


def measure(name, what, label):
    trial = larger(next(t for t in TRIALS if t.name == name), 16)
    fused = pointwise(trial.function, autograd=True)
    if what == "training":
        leaves = arguments_of(trial, device, trained=True)
        given = [torch.rand_like(r) for r in (lambda r: r if isinstance(r, tuple) else (r,))(trial.function(*leaves))]
        call = training(fused, leaves, given)
    else:
        call = inference(fused, arguments_of(trial, device, trained=False))
    for _ in range(5):
        call()
    ms = statistics.median(on_gpu(call) for _ in range(5))
    print(f"{name} | {what} | {label} | {ms:.4f}", flush=True)
    if label == "as is":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            call()
            torch.cuda.synchronize()
        for e in p.key_averages():
            print(f"      {e.device_time_total:9.1f} us  {e.key[:90]}", flush=True)


def outer_alone():
    import torch._inductor.config as config

    for mixed in (None, False):
        torch._dynamo.reset()
        if mixed is not None:
            config.triton.mix_order_reduction = mixed
        x = torch.rand(16384, 1, device=device, requires_grad=True)
        y = torch.rand(1, 1024, device=device, requires_grad=True)
        try:
            r = torch.compile(outer)(x, y)
            g = torch.autograd.grad(r, (x, y), torch.rand_like(r))
            print("torch.compile(outer) alone, mix_order_reduction", mixed, [t.shape for t in g], flush=True)
        except Exception as error:
            print(
                "torch.compile(outer) alone, mix_order_reduction",
                mixed,
                type(error).__name__,
                str(error)[:200],
                flush=True,
            )


NAMES = ["x * bias", "NHWC channel", "RMSNorm", "LayerNorm", "rotary, halves", "outer, exp"]
outer_alone()
for name in [
    *NAMES,
    "per row",
    "NCHW channel",
    "DDIM step",
    "wrapped angle",
    "Lennard-Jones",
    "rotary, pairs",
    "RGB to gray",
]:
    measure(name, "training", "as is")
for name in ("x + y.T", "Lennard-Jones", "rotary, pairs"):
    measure(name, "inference", "as is")
for block, programs, columns in (
    (1024, 1024, 512),
    (2048, 512, 512),
    (2048, 2048, 512),
    (4096, 512, 512),
    (2048, 1024, 128),
    (1024, 2048, 256),
):
    if time.time() - begun > 62:
        break
    rk._SUMMING_BLOCK, rk._SUMMING_PROGRAMS, rk._SUMMED_COLUMNS = block, programs, columns
    for name in NAMES:
        measure(name, "training", f"block {block}, programs {programs}, columns {columns}")
for tile, columns in ((1024, 32), (4096, 64), (2048, 32), (4096, 128)):
    if time.time() - begun > 80:
        break
    rk._TILE, rk._TILE_COLUMNS = tile, columns
    measure("x + y.T", "inference", f"tile {tile}, columns {columns}")
