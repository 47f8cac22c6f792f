"""Number of spikes that differ between ways to run recurrent networks, with weights in float32 and on a grid.

    python benchmarks/exact_sums.py [--output FILE] [--elements 1e9] [--device cuda] [--seconds 240]

Each row shows a network, a way to run it, and the number of spikes that differ from the reference. The reference is the
loop over time on the same device with torch's product. The other ways are compiled kernels, two batches instead of one,
the neurons in another order, another process, and the CPU with one sixty-fourth of the element-steps. The element-steps
are divided equally among the rows with weights in float32, and among the rows with weights on a grid. Each network runs
in a separate process. The list below the table compares the spikes of two processes and of the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import describe_machine, publish, run_in_processes, table
from torch import Tensor, nn

from flexsn_nn import LIF, RLIF, exact_products, functional, on_grid

WIDTHS = (128, 256, 512)
STEPS, CHUNK = 500, 64


def make_network(kind: str, grid: bool, device: str) -> Any:
    """Makes the network `"RLIF 256"`, or `"three layers"` of 128 neurons, the last of which is recurrent."""
    torch.manual_seed(0)
    layers: list[nn.Module]
    if kind == "three layers":
        layers = [nn.Linear(64, 128), LIF(), nn.Linear(128, 128), LIF(), nn.Linear(128, 128), RLIF(128)]
    else:
        layers = [RLIF(int(kind.split()[1]))]
    for layer in layers:
        weighted: Any = layer.recurrent if isinstance(layer, RLIF) else layer
        if isinstance(weighted, nn.Linear):
            # With weights of this size, the last layer of a stack fires.
            nn.init.normal_(weighted.weight, std=(8 if kind == "three layers" else 2) / weighted.in_features**0.5)
            if grid:
                on_grid(weighted)
    return nn.Sequential(*layers).to(device)


def make_inputs(kind: str, batch: int, seed: int) -> Tensor:
    """Returns spikes for the three layers, or currents for a single recurrent layer. They are drawn on the CPU, so that
    all devices get equal inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "three layers":
        return (torch.rand(STEPS, batch, 64, generator=generator) < 0.2).float()
    return torch.randn(STEPS, batch, int(kind.split()[1]), generator=generator) + 0.5


def run_network(net: nn.Module, x: Tensor) -> Tensor:
    functional.reset_net(net)
    with torch.no_grad():
        spikes: Tensor = net(x)
    return spikes


def run_in_two_parts(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat(
        [run_network(net, part) for part in x.split([x.shape[1] // 3, x.shape[1] - x.shape[1] // 3], 1)], 1
    )


def make_permuted_run(kind: str, grid: bool, device: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """Returns a function that permutes the recurrent neurons, runs the network, and undoes the permutation in the
    results.
    """

    def run_permuted(net: nn.Module, x: Tensor) -> Tensor:
        twin = make_network(kind, grid, device)
        recurrent = twin[-1].recurrent
        order = torch.randperm(recurrent.in_features, generator=torch.Generator().manual_seed(3)).to(device)
        weight = recurrent.parametrizations.weight.original if grid else recurrent.weight
        with torch.no_grad():
            weight.copy_(weight[order[:, None], order])
            if kind == "three layers":
                for tensor in twin[4].parameters():
                    tensor.copy_(tensor[order])
        permuted_input = x if kind == "three layers" else x[..., order]
        result = torch.empty_like(reference := run_network(twin, permuted_input))
        result[..., order] = reference
        return result

    return run_permuted


def compute_digest(kind: str, grid: bool, device: str, batch: int, seed: int) -> str:
    spikes = run_network(make_network(kind, grid, device), make_inputs(kind, batch, seed).to(device))
    return hashlib.sha256(spikes.to(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def list_ways(kind: str, grid: bool, device: str) -> Iterator[tuple[str, Callable[[nn.Module, Tensor], Tensor]]]:
    yield "kernels", run_network
    yield "kernels, the batch in two parts", run_in_two_parts
    yield "kernels, neurons in another order", make_permuted_run(kind, grid, device)
    if kind == "three layers":

        def run_exact_products(net: nn.Module, x: Tensor) -> Tensor:
            products = exact_products(net, also=["0"])
            try:
                return run_network(net, x)
            finally:
                products.undo()

        yield "kernels and exact products", run_exact_products

    def run_on_cpu(net: nn.Module, x: Tensor) -> Tensor:
        return run_network(make_network(kind, grid, "cpu"), x.cpu()).to(device)

    if device != "cpu":
        yield "kernels on the CPU", run_on_cpu


class Job(NamedTuple):
    """A network to run in all ways.

    Attributes:
        elements: number of element-steps of each way.
        deadline: time, as in `time.time`, after which no further way starts.
    """

    kind: str
    grid: bool
    device: str
    elements: float
    deadline: float


class Outcome(NamedTuple):
    """Rows of the table, and SHA-256 digests of the spikes of one batch, on the device of the job and on the CPU."""

    rows: list[tuple[str, ...]]
    digests: tuple[str, ...]


def run_job(job: Job) -> Outcome:
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    devices = dict.fromkeys((job.device, "cpu"))
    digests = tuple(compute_digest(job.kind, True, device, 65, 0) for device in devices) if job.grid else ()
    return Outcome(list(measure_rows(job)), digests)


def run_elsewhere(job: Job) -> str:
    torch.set_float32_matmul_precision("highest")
    return compute_digest(job.kind, True, job.device, 65, 0)


def measure_rows(job: Job) -> Iterator[tuple[str, ...]]:
    kind, grid, device, elements, deadline = job
    features = 128 if kind == "three layers" else int(kind.split()[1])
    loop, net = make_network(kind, grid, device), make_network(kind, grid, device)
    functional.set_backend(loop, "torch")
    for name, way in list_ways(kind, grid, device):
        share = elements / 64 if "CPU" in name else elements
        differ = count = seed = 0
        fired = 0.0
        while count < share and time.time() < deadline:
            largest_batch = CHUNK if device == "cpu" or "CPU" in name else 1024
            batch = max(3, min(largest_batch, round((share - count) / (STEPS * features))))
            x = make_inputs(kind, batch, seed).to(device)
            expected = run_network(loop, x)
            differ += int((way(net, x) != expected).sum())
            fired += float(expected.mean()) * expected.numel()
            count, seed = count + expected.numel(), seed + 1
        weights = "grid, 16 bits" if grid else "float32"
        if count:
            yield kind, weights, name, f"{count:.1e}", f"{fired / count:.3f}", str(differ), f"{differ / count:.1e}"
        else:
            yield kind, weights, name, "not run", "", "", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "exact_sums.md")
    parser.add_argument(
        "--elements",
        type=float,
        default=1e9,
        help="number of element-steps of all rows with a grid, and also of all rows without a grid",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=240, help="no further row starts after this time")
    arguments = parser.parse_args()
    deadline = time.time() + arguments.seconds
    kinds = [*(f"RLIF {width}" for width in WIDTHS), "three layers"]
    # The CPU runs few element-steps in comparison, so they are not counted.
    shares = {kind: sum("CPU" not in name for name, _ in list_ways(kind, True, arguments.device)) for kind in kinds}
    elements_per_row = arguments.elements / sum(shares.values())
    jobs = [Job(kind, grid, arguments.device, elements_per_row, deadline) for grid in (True, False) for kind in kinds]
    outcomes = run_in_processes(run_job, jobs)
    elsewhere = run_in_processes(run_elsewhere, jobs[: len(kinds)])
    result_rows = [row for outcome in outcomes for row in outcome.rows]
    digests = []
    for kind, outcome, elsewhere_digest in zip(kinds, outcomes, elsewhere, strict=False):
        is_same = len({*outcome.digests, elsewhere_digest}) == 1
        digests.append(f"- {kind}: {'the same' if is_same else 'OTHER'} spikes; SHA-256 {elsewhere_digest[:16]}")
    heading = f"On the grid, in another process on {arguments.device}, and on the CPU:"
    publish([*make_page(result_rows, arguments.device), "", heading, "", *digests], arguments.output)


def make_page(result_rows: list[tuple[str, ...]], device: str) -> list[str]:
    header = ("network", "weights", "run by", "element-steps", "rate", "spikes that differ", "of all")
    return ["# Spikes that differ", "", describe_machine(torch.device(device)), "", *table(header, result_rows)]


if __name__ == "__main__":
    main()
