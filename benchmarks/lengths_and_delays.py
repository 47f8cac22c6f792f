"""Times of layers with lengths, resets and delays, compared with the same layers without these features. Recurrent
delays are compared with their published form.

    python benchmarks/lengths_and_delays.py [--output FILE] [--seconds 55] [--check]

A figure is the time of a training step: a forward, and a backward that computes the gradients of inputs and parameters
from a random gradient. A row compares two layers. Their calls alternate within one run, and the ratio is the ratio of
their medians. Each row is measured in two ways: called from Python, and replayed as a CUDA graph of ten steps (one step
for recurrent layers), which excludes the time of the host. Lengths are uniformly distributed, have a mean of T / 2, and
are sorted with the longest first. In each step, the published form of recurrent delays adds one product for each delay
to a buffer of future currents (Queant et al., "DelRec", 2025). Here, the published form is a loop over two layers
without input weights. This project's form is two layers `Recurrent(LIF(), delay=Delay(interpolation=...))`. `--check`
runs small shapes on any device. After `--seconds`, no further measurement starts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, publish, synchronize, table
from torch import Tensor, nn

from flexsn_nn import LIF, Recurrent, functional, surrogate
from flexsn_nn.fusion import fuse_delays
from flexsn_nn.layer import Delay

RESULTS = Path(__file__).parent / "results" / "lengths_and_delays.md"
MAX_DELAY = 30
THRESHOLD = 0.4  # low enough that the second layer fires
# Number of training steps of a neuron in one graph. A single step takes less time than waiting for the device.
IN_A_GRAPH = 10
BOUND = (
    "A training step of LIF moves five streams: the forward reads the input and writes the output, and the backward "
    "reads the input and a gradient and writes a gradient. With half of the data, 3.5 of these streams remain "
    "(a ratio of 0.70), because outputs and gradients are also written for the padding. If all programs run at the "
    "same time (100 x 256 x 140, and recurrent layers with few rows), all of them wait for the longest sequence. "
    "Recurrent layers in clusters of blocks compute all steps. Loops with delays cannot be faster than loops without "
    "delays. A fused learned delay needs two more launches: a copy of the last inputs and a sum over the batch. At "
    "100 x 256 x 140, these launches take 9 of the 52 microseconds of a step. Resets take 3 to 4 more microseconds at "
    "this size, both for 96 steps and for 192 steps."
)
Run = Callable[[], object]


class Published(nn.Module):
    """A recurrent layer with a buffer of future currents, and one product for each delay in each step."""

    def __init__(self, weight: Tensor, delay: Tensor, width: float) -> None:
        super().__init__()
        self.weight, self.delay = nn.Parameter(weight.clone()), nn.Parameter(delay.clone())
        self.width, self.spike = width, surrogate.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        count = MAX_DELAY + 1
        steps = torch.arange(count, device=x.device, dtype=x.dtype)
        taps = (self.width - (steps - self.delay.unsqueeze(1)).abs()).clamp(min=0) / self.width**2  # shape [N, L]
        future = x.new_zeros(*x.shape[1:], count)
        v, rows = torch.zeros_like(x[0]), []
        for current in x.unbind(0):
            h = v + (current + future[..., 0] - v) / 2
            s = self.spike(h - THRESHOLD)
            v = h * (1 - s)
            future = nn.functional.pad(future[..., 1:], (0, 1)) + self.weight @ (s.unsqueeze(-1) * taps)
            rows.append(s)
        return torch.stack(rows)


def make_training_step(net: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> Run:
    leaf = x.clone().requires_grad_()
    gradient = torch.randn(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(1)).to(x.dtype)
    leaves = [leaf, *parameters]
    return lambda: torch.autograd.grad(net(leaf), leaves, gradient)


def add_reset(net: nn.Module, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        functional.reset_net(net)
        return call(x)

    return run


def time_calls(first: Run, second: Run, device: torch.device, turns: int) -> tuple[float, float]:
    """Returns the median times of two alternating calls, in ms."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 2):
        for run, times_of_run in zip((first, second), times, strict=True):
            synchronize(device)
            begun = time.perf_counter()
            run()
            synchronize(device)
            if turn >= 2:  # the first two rounds compile kernels
                times_of_run.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[0]), statistics.median(times[1])


def capture_calls(run: Run, times: int = 1) -> Run:
    """Captures `times` calls of `run` in a CUDA graph, and returns a function that replays the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def make_neuron_rows(shape: tuple[int, int, int], device: torch.device) -> list[tuple[str, Run, Run]]:
    num_steps, batch, features = shape
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + 0.3).to(device)
    lengths = torch.randint(0, num_steps + 1, (batch,), generator=generator).sort(descending=True).values.to(device)
    full = torch.full((batch,), num_steps, device=device)
    resets = (torch.rand(num_steps, batch, generator=generator) < 0.02).to(device)
    neuron = LIF()
    dense = make_training_step(add_reset(neuron, neuron), x, [])
    delay = Delay(15 * torch.rand(features, generator=generator), max_delay=16, learn=True).to(device)
    net = nn.Sequential(delay, LIF()).to(device)
    fuse_delays(net)
    return [
        (
            "lengths, half of the data",
            make_training_step(add_reset(neuron, lambda x: neuron(x, lengths=lengths)), x, []),
            dense,
        ),
        (
            "lengths, all of the data",
            make_training_step(add_reset(neuron, lambda x: neuron(x, lengths=full)), x, []),
            dense,
        ),
        ("resets", make_training_step(add_reset(neuron, lambda x: neuron(x, resets=resets)), x, []), dense),
        ("a Delay in front, learned, fused", make_training_step(add_reset(net, net), x, list(net.parameters())), dense),
    ]


def make_recurrent_rows(shape: tuple[int, int, int], device: torch.device) -> list[tuple[str, Run, Run]]:
    """Returns rows for a recurrent layer with lengths: a name, and the training steps with and without lengths."""
    num_steps, batch, features = shape
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + 0.3).to(device)
    lengths = torch.randint(0, num_steps + 1, (batch,), generator=generator).sort(descending=True).values.to(device)
    full = torch.full((batch,), num_steps, device=device)
    layer = Recurrent(LIF(), features).to(device)
    parameters = list(layer.parameters())
    dense = make_training_step(add_reset(layer, layer), x, parameters)
    return [
        (
            f"a recurrent layer, {name}",
            make_training_step(add_reset(layer, lambda x, n=n: layer(x, lengths=n)), x, parameters),  # type: ignore[misc]
            dense,
        )
        for name, n in (("lengths, half of the data", lengths), ("lengths, all of the data", full))
    ]


def make_delayed_layers(
    shape: tuple[int, int, int], interpolation: str, width: float, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Returns two recurrent layers with delays in this project's form, the layers in the published form with the same
    parameters, and an input.
    """
    features = shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(device, dtype)
    ours, published = nn.Sequential(), nn.Sequential()
    for _ in range(2):
        delay = 0.25 + (MAX_DELAY - 1) * torch.rand(features, generator=generator)
        options = {} if interpolation == "linear" else {"interpolation": interpolation, "width": width}
        late = Delay(delay, max_delay=MAX_DELAY, learn=True, **options)  # type: ignore[arg-type]
        layer = Recurrent(LIF(v_threshold=THRESHOLD), features, delay=late)
        with torch.no_grad():
            layer.recurrent.weight.copy_(torch.randn(features, features, generator=generator) / features**0.5 / 2)  # type: ignore[operator]
        ours.append(layer)
        published.append(Published(layer.recurrent.weight.detach(), delay, width))  # type: ignore[operator]
    return ours.to(device, dtype), published.to(device, dtype), x


def describe_difference(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> str:
    """Describes the largest relative difference of a gradient from the gradient of the published form in float64.

    Args:
        dtype: dtype of this project's form. In float32, this form runs in kernels, and in float64, in the loop.
    """
    ours, _, x = make_delayed_layers(shape, "triangle", 3.0, device, dtype)
    _, published, _ = make_delayed_layers(shape, "triangle", 3.0, device, torch.float64)
    if dtype == torch.float64:
        functional.set_backend(ours, "torch")
    gradients = make_training_step(add_reset(ours, ours), x, list(ours.parameters()))()
    theirs = dict(published.named_parameters())
    order = [
        n.replace("recurrent.weight", "weight").replace("delay.delay", "delay") for n, _ in ours.named_parameters()
    ]
    expected = make_training_step(published, x.double(), [theirs[name] for name in order])()
    pairs = list(zip(gradients, expected, strict=True))  # type: ignore[call-overload]
    assert all(b.any() for _, b in pairs)
    functional.reset_net(ours)
    spikes = int((ours(x).double() != published(x.double())).sum())
    largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return (
        f"Gradients of recurrent delays in {str(dtype).removeprefix('torch.')}, {shape}, differ from those of the "
        f"published form in float64 by {largest:.1e}. {spikes} spikes differ."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    turns = 2 if options.check else 8
    shapes = [(12, 3, 40)] if options.check else [(250, 256, 512), (1000, 128, 1024), (100, 256, 140)]
    rows: list[list[str]] = []
    notes: list[str] = []

    def format_times(with_ms: float, without_ms: float) -> list[str]:
        return [f"{with_ms:.3f}", f"{without_ms:.3f}", f"{with_ms / without_ms:.3f}"]

    def measure_row(name: str, shape: tuple[int, int, int], first: Run, second: Run, turns: int) -> None:
        if time.perf_counter() - begun < options.seconds:
            python_ms = time_calls(first, second, device, turns)
            cells = format_times(*python_ms)
            if device.type == "cuda":
                try:
                    times = IN_A_GRAPH if turns > 4 else 1
                    graph_ms = time_calls(capture_calls(first, times), capture_calls(second, times), device, turns)
                    cells += format_times(*(ms / times for ms in graph_ms))
                    if "published" in name:
                        faster = python_ms[1] / python_ms[0], python_ms[1] / graph_ms[0], graph_ms[1] / graph_ms[0]
                        notes.append(
                            "{}, {}: {:.0f} times as fast as the loop if both are called from Python. As a CUDA graph, "
                            "{:.0f} times as fast as that loop, and {:.0f} times as fast as the loop as a CUDA "
                            "graph.".format(name, shape, *faster)
                        )
                except RuntimeError as error:
                    notes.append(f"{name}, {shape}: no CUDA graph, {str(error).splitlines()[0]}")
                    torch.cuda.synchronize()
            rows.append([name, " x ".join(map(str, shape)), *cells, *[""] * (6 - len(cells))])

    notes.append(describe_difference((40, 3, 16), device, torch.float64))
    notes.append(describe_difference((12, 3, 16) if options.check else (40, 16, 256), device, torch.float32))

    def measure_delays(shape: tuple[int, int, int], interpolation: str, width: float) -> None:
        if time.perf_counter() - begun > options.seconds:
            return
        ours, published, x = make_delayed_layers(shape, interpolation, width, device, torch.float32)
        name = f"2 recurrent layers, {interpolation}, and the published loop"
        first = make_training_step(add_reset(ours, ours), x, list(ours.parameters()))
        measure_row(name, shape, first, make_training_step(published, x, list(published.parameters())), 4)
        last = ours[0]  # type: ignore[index]
        assert isinstance(last, Recurrent)
        notes.extend(f"{name}, {shape}: {line.strip()}" for line in last.explain().splitlines() if "the last" in line)
        if interpolation == "linear" and device.type == "cuda":
            plain = nn.Sequential(*(Recurrent(LIF(v_threshold=THRESHOLD), shape[-1]) for _ in range(2))).to(device)
            bare = capture_calls(make_training_step(add_reset(plain, plain), x, list(plain.parameters())))
            notes.append(
                f"The layers without delays, {shape}: {time_calls(bare, bare, device, 4)[0]:.3f} ms in a CUDA graph."
            )

    small, large = [(12, 3, 16)] * 2 if options.check else [(100, 256, 256), (100, 128, 512)]
    measure_delays(small, "linear", 1.0)
    measure_delays(large, "linear", 1.0)
    measure_delays(small, "triangle", 10.0)
    for shape in [(12, 3, 16)] if options.check else [(250, 4096, 64), (250, 256, 256)]:
        for name, first, second in make_recurrent_rows(shape, device):
            measure_row(name, shape, first, second, 4)
    for shape in shapes:
        for name, first, second in make_neuron_rows(shape, device):
            measure_row(name, shape, first, second, turns)
    measure_delays(large, "triangle", 10.0)
    notes.append(BOUND)
    head = [
        "# Lengths, resets and delays",
        "",
        describe_machine(device),
        "",
        "T x batch x neurons, float32, ms of a training step.",
        "",
    ]
    columns = ["with", "without, or published", "ratio"]
    lines = table(["what", "shape", *columns, *(f"{column}, in graphs" for column in columns)], rows)
    publish([*head, *lines, "", *[f"- {note}" for note in notes]], options.output)


if __name__ == "__main__":
    main()
