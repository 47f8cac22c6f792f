"""Times of spike pooling, forward and backward, compared with torch's pooling and with a copy of the same bytes.

    python benchmarks/spike_pooling.py [--output FILE]

A forward reads the input and writes the result. A backward reads the gradient of the result and writes the gradient of
the input. The copy moves the bytes of these tensors. It does not include the codes that store the positions of maxima.
`kept` is the memory that is saved for the backward, relative to the bytes of the input. torch saves the input, and 64
bits for each element of the result. All calls are replayed from CUDA graphs, and alternate. The script needs a GPU, but
`--check` runs small shapes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from measure import capture_graph, describe_machine, milliseconds, publish, table
from torch import Tensor, nn

from flexsn_nn import spike_pooling

FRAMES, TURNS, RATE = 128, 3, 0.1
FORMATS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Case(NamedTuple):
    """A layer and its input: the number of channels, and the side length of the images."""

    name: str
    make: Callable[[], nn.Module]
    channels: int
    side: int


CASES = (
    Case("max 3 x 3 / 2", lambda: nn.MaxPool2d(3, 2, 1), 64, 112),
    Case("max 2 x 2 / 2", lambda: nn.MaxPool2d(2), 64, 112),
    Case("max 2 x 2 / 2", lambda: nn.MaxPool2d(2), 256, 28),
    Case("average 2 x 2 / 2", lambda: nn.AvgPool2d(2), 64, 112),
)


class Times(NamedTuple):
    """Times in milliseconds of a copy, of a forward, and of a forward with its backward, here and in torch."""

    copy: float
    forward: float
    both: float
    torch_forward: float
    torch_both: float


def measure_case(case: Case, dtype: torch.dtype, form: str, device: torch.device) -> tuple[Times, float, float]:
    """Returns the times, and the bytes that this project and torch save for the backward, relative to the input."""
    frames, side = (FRAMES, case.side) if device.type == "cuda" else (2, 9)
    spikes = torch.rand(frames, case.channels, side, side, device=device) < RATE
    x = spikes.to(dtype).contiguous(memory_format=FORMATS[form]).requires_grad_()
    theirs, ours = case.make(), case.make()
    spike_pooling(ours)
    with torch.no_grad():  # an autograd graph that stays alive would have nodes of another stream
        y = theirs(x)
    gradient = torch.randn_like(y)
    copied_elements = (x.numel() + y.numel()) // 2
    source, target = (torch.empty(copied_elements, dtype=dtype, device=device) for _ in range(2))

    def train(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), x, gradient)

    works: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: ours(x),
        lambda: train(ours),
        lambda: theirs(x),
        lambda: train(theirs),
    ]
    runs = [capture_graph(work) for work in works] if device.type == "cuda" else works
    turns = [[milliseconds(run, device, warmup=3, rep=12) for run in runs] for _ in range(TURNS)]
    times = Times(*(sorted(times_of_call)[TURNS // 2] for times_of_call in zip(*turns, strict=True)))
    return times, measure_saved(ours, x), measure_saved(theirs, x)


def measure_saved(layer: nn.Module, x: Tensor) -> float:
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(sizes) / x.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "spike_pooling.md")
    parser.add_argument("--check", action="store_true", help="small shapes on the CPU, with TRITON_INTERPRET=1")
    options = parser.parse_args()
    device = torch.device("cpu" if options.check else "cuda")
    lines = []
    for dtype, torch_dtype in DTYPES.items():
        for form in FORMATS:
            for case in CASES:
                times, ours, theirs = measure_case(case, torch_dtype, form, device)
                row = (
                    dtype,
                    form,
                    f"{case.name}, {case.channels} x {case.side}²",
                    f"{1e3 * times.copy:.0f}",
                    f"{times.forward / times.copy:.2f}",
                    f"{(times.both - times.forward) / times.copy:.2f}",
                    f"{times.torch_forward / times.copy:.2f}",
                    f"{(times.torch_both - times.torch_forward) / times.copy:.2f}",
                    f"{times.both / times.torch_both:.2f}",
                    f"{ours:.3f}",
                    f"{theirs:.2f}",
                )
                lines.append(row)
                print(*row, sep=" | ", flush=True)
    head = ("dtype", "format", "layer", "copy, µs", "forward / copy", "backward / copy", "torch's forward",
            "torch's backward", "both / torch's", "kept", "torch's")  # fmt: skip
    publish(
        [
            f"# Pooling of spikes, {FRAMES} frames",
            "",
            "`python benchmarks/spike_pooling.py`: `spike_pooling` and torch's layers. A copy moves the bytes of the",
            "input and the result once. All calls are replayed from CUDA graphs.",
            describe_machine(device),
            "",
            *table(head, lines),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
