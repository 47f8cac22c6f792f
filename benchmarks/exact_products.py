"""Products with spikes, computed in parts on tensor cores: their times and errors compared with torch's products, and
training steps compared with ReLU.

    python benchmarks/exact_products.py [--output FILE] [--sweep | --profile | --networks] [--only NETWORK ...]
        [--seconds 240]

The first table shows one product: its forward and both gradients, replayed from a CUDA graph. Spikes are in bfloat16
and gradients are in parts, as neurons write them. The time includes splitting the weight into parts. "Narrowed" also
includes the conversion of float32 spikes, which a layer receives if no neuron precedes it. An error is the root mean
square of the differences from float64, relative to the root mean square of the result. With `--sweep`, the script
measures tiles instead, and with `--profile`, the kernels of whole training steps.

The second table shows whole training steps of networks with LIF neurons and with ReLU, called from Python and replayed
from a CUDA graph. The measurements of the networks alternate. The compiled launcher is enabled from the start. "Host"
is the time to issue a step. Torch's products are in float32 or in TF32, as labelled. The script needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import networks
import torch
from measure import capture_graph, describe_machine, issue_time, milliseconds, publish, run_in_processes, table
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import LIF, exact_products, functional
from flexsn_runtime import spike_linear
from flexsn_runtime.products import _launch
from flexsn_runtime.products._tiles import Tile

SHAPES = ((64000, 704, 512), (64000, 512, 512), (3200, 1024, 1024), (25088, 512, 2048), (25088, 2048, 512),
          (8192, 4096, 4096), (4096, 8192, 1024))  # fmt: skip
SWEPT = ((3200, 1000, 1000), (64000, 512, 512), (8192, 4096, 4096))
# Tiles for a product and its number of parts. A tile has rows, columns, chunk, number of warps, and number of stages.
_TILES = {
    ("y", 3): (
        (128, 128, 64, 8, 3), (128, 64, 32, 4, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 2), (128, 128, 32, 8, 3),
    ),
    ("y", 2): ((128, 64, 64, 8, 3),),
    ("dW", 3): ((128, 128, 64, 8, 3), (128, 64, 64, 4, 3)),
    ("dW", 2): ((64, 128, 64, 4, 3), (128, 64, 64, 4, 3)),
    ("ds", 3): ((128, 128, 32, 8, 3), (128, 64, 32, 8, 3), (64, 128, 32, 4, 3), (128, 64, 32, 4, 3)),
    ("ds", 2): ((64, 128, 32, 4, 3),),
}  # fmt: skip
# Tiles for products whose sums stay in the accumulators of the tensor cores.
_STAYING = ((128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (64, 256, 32, 4, 3))
NETWORKS = {"704-512-512-20": (704, 512, 512, 20, 250, 256), "784-1000-1000-10": (784, 1000, 1000, 10, 25, 128)}
SAMPLED = 1024
WORKS = ("y", "dW", "ds")


class Operands(NamedTuple):
    """Operands of one product, and the gradient of its result."""

    s: Tensor
    weight: Tensor
    grad: Tensor


def make_operands(shape: tuple[int, int, int], rate: float) -> Operands:
    rows, features, outputs = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw_normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator)

    s = (torch.rand(rows, features, device="cuda", generator=generator) < rate).float()
    scales = torch.rand(rows, outputs, device="cuda", generator=generator).pow(6)
    return Operands(s, draw_normal(outputs, features) / features**0.5, draw_normal(rows, outputs) * scales)


def multiply_by_torch(work: str, factors: Operands) -> Callable[[], Tensor]:
    return {
        "y": lambda: factors.s @ factors.weight.t(),
        "dW": lambda: factors.grad.t() @ factors.s,
        "ds": lambda: factors.grad @ factors.weight,
    }[work]


def multiply_in_parts(work: str, factors: Operands, parts: int) -> Callable[[], Tensor]:
    """Returns a function that launches the product in `parts` parts, as a layer between neurons does."""
    spikes = factors.s.bfloat16()
    grads = tuple(_launch.split(factors.grad, parts))
    N, K = factors.weight.shape
    return {
        "y": lambda: _launch.product(spikes, _launch.split(factors.weight, parts), None),
        "dW": lambda: _launch.product_over_rows(grads, spikes, N, K),
        "ds": lambda: _launch.input_gradient(grads, _launch.split(factors.weight, parts), K),
    }[work]


def multiply_narrowed(work: str, factors: Operands) -> Callable[[], Tensor] | None:
    """Returns a function that computes the product in three parts, as a layer without neurons before and after it does,
    or `None` if the product is not `"y"`.
    """
    if work != "y":
        return None
    return lambda: spike_linear(factors.s, factors.weight, None)[0]


def measure_error(work: str, factors: Operands, actual: Tensor) -> float:
    sampled_rows = slice(0, SAMPLED)
    if work == "dW":
        columns = slice(0, 256)
        expected, actual = factors.grad[:, columns].double().t() @ factors.s.double(), actual[columns]
    elif work == "y":
        expected, actual = factors.s[sampled_rows].double() @ factors.weight.double().t(), actual[sampled_rows]
    else:
        expected, actual = factors.grad[sampled_rows].double() @ factors.weight.double(), actual[sampled_rows]
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def measure_product(shape: tuple[int, int, int], rate: float) -> Iterator[tuple[str, ...]]:
    factors = make_operands(shape, rate)
    for work in WORKS:
        times, errors = [], []
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            times.append(milliseconds(capture_graph(multiply_by_torch(work, factors)), factors.s.device))
            errors.append(measure_error(work, factors, multiply_by_torch(work, factors)()))
        torch.set_float32_matmul_precision("highest")
        for parts in (3, 2):
            run = multiply_in_parts(work, factors, parts)
            times.append(milliseconds(capture_graph(run), factors.s.device))
            errors.append(measure_error(work, factors, run()))
        with_conversion = multiply_narrowed(work, factors)
        conversion_ms = (
            "" if with_conversion is None else f"{milliseconds(capture_graph(with_conversion), factors.s.device):.3f}"
        )
        ratios = [f"{times[2] / times[0]:.2f}", f"{times[3] / times[1]:.2f}"]
        sizes = " x ".join(map(str, shape))
        yield (
            sizes,
            f"{rate}",
            work,
            *(f"{t:.3f}" for t in times),
            conversion_ms,
            *ratios,
            *(f"{e:.1e}" for e in errors),
        )


# -- tiles -------------------------------------------------------------------------------------------------------------


class Swept(NamedTuple):
    """One kernel to measure: its product, its number of parts and its tile. Spikes are in bfloat16."""

    work: str
    parts: int
    tile: Tile


def list_swept() -> list[Swept]:
    """Returns all kernels to measure. Kernels that hold the first factor in registers come first."""
    cases = []
    for held in (True, False):
        for (work, parts), tiles in _TILES.items():
            cases += [Swept(work, parts, Tile(*tile, held=held)) for tile in tiles]
            if parts == 2 and work != "dW":
                cases += [Swept(work, parts, Tile(*tile, leaves=False, held=held)) for tile in _STAYING]
    return cases


def make_run(case: Swept, factors: Operands) -> Callable[[], Tensor]:
    spikes, grads = factors.s.bfloat16(), tuple(_launch.split(factors.grad, case.parts))
    weight_parts = _launch.split(factors.weight, case.parts)
    N, K = factors.weight.shape
    return {
        "y": lambda: _launch.product(spikes, weight_parts, None, case.tile),
        "dW": lambda: _launch.product_over_rows(grads, spikes, N, K, case.tile),
        "ds": lambda: _launch.input_gradient(grads, weight_parts, K, case.tile),
    }[case.work]


def compile_all(cases: list[Swept]) -> None:
    """Compiles kernels into the cache on disk."""
    all_operands = [make_operands(shape, 0.1) for shape in SWEPT]
    for case in cases:
        for factors in all_operands:
            try:
                make_run(case, factors)()
            except Exception as failure:  # the measurement will report the error again
                print(case, str(failure)[:100], flush=True)


def sweep(deadline: float) -> Iterator[list[str]]:
    """Yields the table so far after each shape."""
    cases = list_swept()
    run_in_processes(compile_all, [cases[i::12] for i in range(12)])
    header = ("work", "parts", "M x K x N", "ms", "of torch's float32", "error", *Tile._fields)
    rows: list[tuple[object, ...]] = []
    for shape in SWEPT:
        factors = make_operands(shape, 0.1)
        base = {work: milliseconds(capture_graph(multiply_by_torch(work, factors)), factors.s.device) for work in WORKS}
        for case in cases:
            if time.monotonic() > deadline:
                break
            try:
                run = make_run(case, factors)
                deviation = measure_error(case.work, factors, run())
                ms = milliseconds(capture_graph(run), factors.s.device, warmup=2, rep=10)
            except Exception as failure:
                print(case, str(failure)[:100], flush=True)
                continue
            ratio = f"{ms / base[case.work]:.2f}"
            rows.append((case.work, case.parts, " x ".join(map(str, shape)), f"{ms:.4f}", ratio, f"{deviation:.1e}",
                         *case.tile))  # fmt: skip
        yield table(header, sorted(rows, key=lambda row: (row[0], row[1], row[2], row[3])))


# -- networks ----------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two hidden layers, the mean over time, and a linear layer on the mean."""

    def __init__(self, sizes: tuple[int, ...], spiking: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(a, b) for a, b in pairwise(sizes))
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.mul_(3.0)
        self.neurons = nn.ModuleList([LIF() if spiking else nn.ReLU() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.neurons[0](self.first(x))
        h = self.neurons[1](self.second(h))
        logits: Tensor = self.last(h.mean(0))
        return logits


class Case(NamedTuple):
    """A network, as a constructor, and its data."""

    name: str
    make: Callable[[bool], nn.Module]
    x: Tensor
    labels: Tensor
    also: tuple[str, ...] = ()


def make_linear_case(name: str) -> Case:
    *sizes, steps, batch = NETWORKS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    x = (torch.rand(steps, batch, sizes[0], device="cuda", generator=generator) < 0.1).float()
    labels = torch.randint(sizes[-1], (batch,), device="cuda", generator=generator)
    title = f"{name}, T {steps}, B {batch}"
    return Case(title, lambda spiking: Network(tuple(sizes), spiking), x, labels, ("first",))


class OverSteps(nn.Module):
    """A network that takes the mean over time of the results of another network. If this mean has more than two
    dimensions, the network also takes the mean over the last dimension, so that its result is `[B, classes]`.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).mean(0)
        return y.mean(-1) if y.dim() > 2 else y


def find_activation(spiking: bool) -> Callable[[], nn.Module]:
    return LIF if spiking else nn.ReLU


def make_large_case(name: str) -> Case:
    generator = torch.Generator("cuda").manual_seed(0)
    if name == "VGG-8":
        x = torch.randn(4, 64, 3, 32, 32, device="cuda", generator=generator)
        make = networks.make_vgg8
        title = "VGG-8, 32 x 32, T 4, B 64"
    else:
        x = (torch.rand(4, 32, 384, 196, device="cuda", generator=generator) < 0.2).float()
        make = partial(networks.SpikformerBlock, 384, 12)
        title = "Spikformer block, 196 tokens of 384, T 4, B 32"
    labels = torch.randint(10, (x.shape[1],), device="cuda", generator=generator)
    return Case(title, lambda spiking: OverSteps(make(find_activation(spiking))), x, labels)


def make_training_step(net: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    parameters = list(net.parameters())

    def step() -> tuple[Tensor, ...]:
        functional.reset_net(net)
        return torch.autograd.grad(F.cross_entropy(net(x), labels), parameters)

    return step


RUNS = (  # name, spiking, exact products, precision of torch's products
    ("ReLU, float32", False, False, "highest"),
    ("ReLU, TF32", False, False, "high"),
    ("LIF, float32", True, False, "highest"),
    ("LIF, TF32", True, False, "high"),
    ("LIF, exact products in three parts", True, True, "highest"),
    ("LIF, exact products in two parts", True, True, "high"),
)


def measure_network(case: Case, rounds: int = 5) -> Iterator[tuple[str, ...]]:
    x, labels = case.x, case.labels
    steps: dict[str, tuple[Callable[[], object], Callable[[], object], str, float]] = {}
    for title, spiking, exact, precision in RUNS:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision(precision)
        net = case.make(spiking).cuda()
        products = exact_products(net, also=case.also) if exact else None
        step = make_training_step(net, x, labels)
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() / 2**20
        if products is not None:
            print(products, flush=True)
        steps[title] = step, capture_graph(step), precision, peak
    times: dict[str, tuple[list[float], list[float], list[float]]] = {title: ([], [], []) for title in steps}
    for _ in range(rounds):
        for title, (called, replay, precision, _) in steps.items():
            torch.set_float32_matmul_precision(precision)
            times[title][0].append(milliseconds(called, x.device, warmup=5, rep=25))
            times[title][1].append(milliseconds(replay, x.device, warmup=5, rep=25))
            times[title][2].append(issue_time(called, x.device))
    torch.set_float32_matmul_precision("highest")
    medians = {title: [statistics.median(values) for values in triples] for title, triples in times.items()}
    for title, (*both, host) in medians.items():
        ratios = [
            f"{mine / theirs:.2f}"
            for base in ("ReLU, float32", "ReLU, TF32")
            for mine, theirs in zip(both, medians[base][:2], strict=True)
        ]
        yield case.name, title, *(f"{values:.3f}" for values in (*both, host)), *ratios, f"{steps[title][3]:.0f}"


def list_kernels(name: str) -> Iterator[tuple[str, ...]]:
    """Yields the kernels of one training step with products in three parts, the longest kernel first."""
    case = make_linear_case(name)
    torch.manual_seed(0)
    net = case.make(True).cuda()
    exact_products(net, also=case.also)
    step = make_training_step(net, case.x, case.labels)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total):
        yield name, event.key[:70], f"{event.count / 10:g}", f"{event.device_time_total / 1e4:.4f}"


def main() -> None:
    os.environ.setdefault("FLEXSN_LAUNCHER", "compiled")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "exact_products.md")
    parser.add_argument("--sweep", action="store_true", help="measure tiles")
    parser.add_argument("--profile", action="store_true", help="list the kernels of training steps")
    parser.add_argument("--networks", action="store_true", help="omit the table of single products")
    parser.add_argument("--only", nargs="*", choices=[*NETWORKS], help="only these linear networks")
    parser.add_argument("--seconds", type=float, default=240, help="time for the sweep")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    lines = ["# Products with spikes", "", describe_machine(torch.device("cuda")), ""]
    if arguments.profile:
        rows = [row for name in NETWORKS for row in list_kernels(name)]
        publish([*lines, *table(("network", "kernel", "launches in a step", "ms in a step"), rows)], arguments.output)
        return
    if arguments.sweep:
        for lines_of_tiles in sweep(deadline):
            publish([*lines, *lines_of_tiles], arguments.output)
        return
    header: tuple[str, ...] = (
        "M x K x N", "rate", "work", "float32, ms", "TF32", "three parts", "two parts", "narrowed", "three / float32",
        "two / TF32",
        "error: float32", "TF32", "three parts", "two parts",
    )  # fmt: skip
    if not arguments.networks:
        rows = [row for shape in SHAPES for row in measure_product(shape, 0.1)]
        for rate in (0.0, 0.5, 1.0):
            rows += measure_product((25088, 2048, 512), rate)
        lines += ["One product:", "", *table(header, rows), ""]
        publish(lines, arguments.output)
    header = ("network", "products", "called from Python, ms", "CUDA graph, ms", "host, ms", "of ReLU in float32",
              "in CUDA graphs", "of ReLU in TF32", "in CUDA graphs", "peak, MiB")  # fmt: skip
    rows = [row for name in arguments.only or NETWORKS for row in measure_network(make_linear_case(name))]
    lines += ["A training step, forward and backward:", ""]
    publish([*lines, *table(header, rows)], arguments.output)
    for name in () if arguments.only else ("Spikformer block", "VGG-8"):
        torch.cuda.empty_cache()
        rows += measure_network(make_large_case(name), rounds=3)
        publish([*lines, *table(header, rows)], arguments.output)


if __name__ == "__main__":
    main()
