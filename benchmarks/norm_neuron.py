"""Times of a batch norm and a LIF neuron as one layer, forward and backward, compared with the time of a copy of the
bytes that the layer has to move.

    python benchmarks/norm_neuron.py [--output FILE]

A stream is the number of bytes of the layer's input. A fused layer moves nine streams: the statistics read one stream,
the forward reads one and writes one, the backward reads two and writes one, and the gradient through the statistics
reads two and writes one. Each row is a layer of a ResNet18 after its convolution, for T = 4 and B = 32. All calls are
replayed from CUDA graphs. A time is the median over rounds. All measured calls run once in each round, so that a change
of the clock rate affects all of them. The script needs a GPU, but `--check` runs small shapes in Triton's interpreter.
`--elements` and `--fewest` change the kernels that sum gradients. `--elements` sets the number of values that a thread
handles. Programs only process several rows if at least `--fewest` programs remain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from measure import capture_graph, describe_machine, milliseconds, publish, run_in_processes, table
from torch import Tensor, nn

from flexsn_nn import LIF
from flexsn_nn.functional import reset_net
from flexsn_nn.layer import NormNeuron
from flexsn_runtime import batch_moments
from flexsn_runtime.kernels import _rows

T, B = 4, 32
STREAMS = 9
TURNS = 3
FORMATS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Shape(NamedTuple):
    """Shape of a layer: the number of channels, the side length of the images, and the number of norms with this shape
    in a ResNet18.
    """

    channels: int
    side: int
    norms: int


SHAPES = (Shape(64, 112, 1), Shape(64, 56, 4), Shape(128, 28, 5), Shape(256, 14, 5), Shape(512, 7, 5))
SMALL = (Shape(5, 6, 1), Shape(64, 3, 19))


class Times(NamedTuple):
    """Times in milliseconds of a copy of one stream, of torch's statistics, of this project's statistics, of the
    forward, of the whole layer, and of torch's norm with ReLU.
    """

    stream: float
    torch_statistics: float
    statistics: float
    forward: float
    whole: float
    relu: float


class Case(NamedTuple):
    """Dtype, memory format, shape and device of a row of the table."""

    dtype: str
    form: str
    shape: Shape
    device: str


def make_calls(case: Case) -> list[Callable[[], object]]:
    """Returns the functions to time: a copy of one stream, the statistics by torch and by this project, the forward,
    the whole layer, and torch's layers.
    """
    device, shape = torch.device(case.device), case.shape
    size = (T * B if device.type == "cuda" else T * 2, shape.channels, shape.side, shape.side)
    frames = torch.randn(size, device=device).to(DTYPES[case.dtype]).contiguous(memory_format=FORMATS[case.form])
    gradient = torch.randn_like(frames)
    x = frames.unflatten(0, (T, -1)).detach().requires_grad_()
    plain = frames.detach().requires_grad_()
    layer = NormNeuron(nn.BatchNorm2d(shape.channels), LIF()).to(device)
    relu = nn.Sequential(nn.BatchNorm2d(shape.channels), nn.ReLU()).to(device)
    mean, var = (torch.zeros(shape.channels, device=device) for _ in range(2))
    target = torch.empty_like(frames)

    def forward() -> Tensor:
        reset_net(layer)
        result: Tensor = layer(x)
        return result

    def run_layer() -> None:
        torch.autograd.grad(forward(), [x, *layer.parameters()], gradient.unflatten(0, (T, -1)))

    def run_relu() -> None:
        torch.autograd.grad(relu(plain), [plain, *relu.parameters()], gradient)

    return [
        lambda: target.copy_(frames),
        lambda: torch.batch_norm_update_stats(frames, mean, var, 0.1),
        lambda: batch_moments(frames),
        forward,
        run_layer,
        run_relu,
    ]


def compile_case(case: Case) -> None:
    for work in make_calls(case):
        work()


def measure_case(case: Case) -> Times:
    device, works = torch.device(case.device), make_calls(case)
    runs = [capture_graph(work) for work in works] if device.type == "cuda" else works
    turns = [[milliseconds(run, device, warmup=2, rep=8) for run in runs] for _ in range(TURNS)]
    copied, *others = [sorted(times)[TURNS // 2] for times in zip(*turns, strict=True)]
    return Times(copied / 2, *others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "norm_neuron.md")
    parser.add_argument("--check", action="store_true", help="small shapes on the CPU, with TRITON_INTERPRET=1")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="measure only this dtype")
    parser.add_argument("--format", choices=FORMATS, action="append", help="measure only this memory format")
    parser.add_argument("--elements", type=int, default=_rows._ELEMENTS)
    parser.add_argument("--fewest", type=int, default=_rows._FEWEST_PROGRAMS)
    options = parser.parse_args()
    _rows._ELEMENTS, _rows._FEWEST_PROGRAMS = options.elements, options.fewest
    device = torch.device("cpu" if options.check else "cuda")
    lines: list[tuple[str, ...]] = []
    sums: dict[tuple[str, str], tuple[float, float, float]] = {}
    shapes = SMALL if options.check else SHAPES
    cases = [
        Case(dtype, form, shape, device.type)
        for dtype in options.dtype or DTYPES
        for form in options.format or FORMATS
        for shape in shapes
    ]
    if device.type == "cuda":
        run_in_processes(compile_case, cases)
    for case in cases:
        dtype, form, shape, _ = case
        times = measure_case(case)
        row = (
            dtype,
            form,
            f"{shape.channels} x {shape.side}²",
            f"{1e3 * times.stream:.1f}",
            f"{times.torch_statistics / times.stream:.2f}",
            f"{times.statistics / times.stream:.2f}",
            f"{(times.forward - times.statistics) / times.stream / 2:.2f}",
            f"{(times.whole - times.forward) / times.stream / 6:.2f}",
            f"{1e3 * times.whole:.1f}",
            f"{times.whole / times.stream / STREAMS:.2f}",
            f"{times.whole / times.relu:.2f}",
        )
        lines.append(row)
        print(*row, sep=" | ", flush=True)
        before = sums.get((dtype, form), (0.0, 0.0, 0.0))
        times_of_shape = (times.whole, STREAMS * times.stream, times.relu)
        whole, copies, relu = (a + shape.norms * b for a, b in zip(before, times_of_shape, strict=True))
        sums[dtype, form] = whole, copies, relu
    head = ("dtype", "format", "layer", "stream, µs", "torch's statistics / stream", "statistics / stream",
            "forward / 2", "backward / 6", "all, µs", "all / 9 streams", "all / torch's norm + ReLU")  # fmt: skip
    totals = [
        (
            dtype,
            form,
            f"{whole:.2f}",
            f"{whole / copies:.2f}",
            f"{relu:.2f}",
            f"{whole / relu:.2f}",
            f"{copies / relu:.2f}",
        )
        for (dtype, form), (whole, copies, relu) in sums.items()
    ]
    publish(
        [
            f"# A batch norm and a LIF as one layer, T {T}, B {B}",
            "",
            "`python benchmarks/norm_neuron.py`: `NormNeuron` in training. A stream is the time of a copy that moves",
            "the bytes of the layer's input. The layer has to move nine streams. Everything is replayed from CUDA",
            "graphs.",
            describe_machine(device),
            "",
            *table(head, lines),
            "",
            "All 20 norms of a ResNet18:",
            "",
            *table(
                (
                    "dtype",
                    "format",
                    "ms",
                    "/ nine streams",
                    "torch's norm + ReLU, ms",
                    "/ norm + ReLU",
                    "nine streams / norm + ReLU",
                ),
                totals,
            ),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
