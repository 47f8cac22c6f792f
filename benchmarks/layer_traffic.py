"""Number of bytes that a training step of a normalised layer moves on a GPU, without the convolution of the layer.

    python benchmarks/layer_traffic.py [--output benchmarks/results/layer_traffic.md]

The layer reads the output of a convolution. It is a batch norm followed by ReLU or LIF, or a `NormNeuron`, whose steps
compute the affine part of the norm. A `NormNeuron` is measured twice: once unchanged, and once with the spikes also
written as bits. A stream is the number of bytes of the convolution's output. Hardware counters count the bytes that
move between the GPU and its memory, and each kernel starts with empty caches. The counters need Nsight Compute (`ncu`).
`time` is the time of the kernels, relative to a copy that reads half a stream and writes half a stream.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from measure import copy_floor, describe_machine, kernel_time, publish, table
from torch import nn

from flexsn_nn import LIF, OverTime
from flexsn_nn.functional import reset_net
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory import PackedSpikes

SHAPE = (4, 32, 64, 112, 112)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
CHANNELS = SHAPE[2]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "ReLU behind the norm": lambda: nn.Sequential(OverTime(nn.BatchNorm2d(CHANNELS)), nn.ReLU()),
    "LIF behind the norm": lambda: nn.Sequential(OverTime(nn.BatchNorm2d(CHANNELS)), LIF()),
    "NormNeuron": lambda: NormNeuron(nn.BatchNorm2d(CHANNELS), LIF()),
    "NormNeuron, with bits": lambda: NormNeuron(nn.BatchNorm2d(CHANNELS), LIF()),
}
ROWS = [(name, form, dtype) for dtype in DTYPES for form in FORMATS for name in LAYERS]
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARK = "spin_kernel"  # name of the kernel of `torch.cuda._sleep`
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def make_training_step(name: str, form: str, dtype: torch.dtype) -> Callable[[], None]:
    device = torch.device("cuda")
    layer = LAYERS[name]().to(device)
    frames = torch.randn(SHAPE, device=device, dtype=dtype).flatten(0, 1).contiguous(memory_format=FORMATS[form])
    x = frames.unflatten(0, SHAPE[:2]).requires_grad_()
    gradient = torch.randn_like(frames).unflatten(0, SHAPE[:2])

    def step() -> None:
        reset_net(layer)
        with PackedSpikes(layer) if name.endswith("bits") else nullcontext():
            output = layer(x)
        torch.autograd.grad(output, [x, *layer.parameters()], gradient)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def profile_bytes() -> list[float]:
    """Returns the number of bytes that the kernels of a step move, for each row. One child process under `ncu` runs all
    steps.
    """
    command = [
        *("ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)),
        *(sys.executable, __file__, "--child"),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    bytes_of_rows: list[float] = []
    for row in csv.DictReader(lines[head:]):
        if MARK in row["Kernel Name"]:
            if row["Metric Name"] == METRICS[0]:
                bytes_of_rows.append(0)
        else:
            bytes_of_rows[-1] += float(row["Metric Value"].replace(",", "")) * BYTES[row["Metric Unit"]]
    return bytes_of_rows


def profile_steps() -> None:
    """Runs a step of each row. A marker kernel precedes each step."""
    for name, form, dtype in ROWS:
        step = make_training_step(name, form, DTYPES[dtype])
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "layer_traffic.md")
    parser.add_argument("--child", action="store_true", help="run one step of each row, for the profiler")
    options = parser.parse_args()
    if options.child:
        profile_steps()
        return
    if shutil.which("ncu") is None:
        parser.error("Nsight Compute (ncu) is not on the path.")
    device, lines, elements = torch.device("cuda"), [], torch.Size(SHAPE).numel()
    copies = {dtype: 1e3 * copy_floor(elements, 2, device, torch_dtype) / 2 for dtype, torch_dtype in DTYPES.items()}
    for (name, form, dtype), moved in zip(ROWS, profile_bytes(), strict=True):
        torch_dtype = DTYPES[dtype]
        streams = moved / (elements * torch_dtype.itemsize)
        time, kernels = kernel_time(make_training_step(name, form, torch_dtype), 5)
        row = (dtype, form, name, f"{streams:.2f}", f"{time / copies[dtype]:.2f}", f"{kernels:.0f}")
        lines.append(row)
        print(*row, sep=" | ", flush=True)
    publish(
        [
            f"# Streams of a normalised layer, {' x '.join(map(str, SHAPE))}",
            "",
            "`python benchmarks/layer_traffic.py`: a training step after the convolution. `streams`: bytes to and from",
            "memory, counted by Nsight Compute, relative to the bytes of the convolution's output. `time`: time of the",
            "kernels, relative to a copy of one stream.",
            describe_machine(device),
            "",
            *table(("dtype", "format", "layer", "streams", "time", "kernels"), lines),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
