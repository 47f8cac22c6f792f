"""Samples per second in training on 1, 2, 4, … GPUs of one machine, with data parallelism and full sharding.

    python benchmarks/scaling.py [--output benchmarks/results/scaling.md] [--processes 1 2 4]

Each process has a separate batch of the same size (weak scaling). A step is a forward, cross entropy of the mean over
time, a backward, and SGD. Its time is the median of `--repeat` steps in the slowest process. Efficiency is the
throughput per GPU divided by the throughput of one GPU in the same run. A new process group is started for each number
of processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measure import describe_machine, publish, synchronize, table
from networks import make_feed_forward, make_sew_resnet18
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from flexsn_nn import LIF
from flexsn_nn.functional import reset_net


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and the input of one process."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype


CASES = (
    Case("SEW-ResNet18, T 4, B 32, 224²", partial(make_sew_resnet18, LIF), (4, 32, 3, 224, 224), 1000, torch.bfloat16),
    Case(
        "700-512-512-20, T 250, B 256",
        partial(make_feed_forward, LIF, 700, 512, 512, 20),
        (250, 256, 700),
        20,
        torch.float32,
    ),
)
SMALL = (Case("8-16-4, T 3, B 2", partial(make_feed_forward, LIF, 8, 16, 4), (3, 2, 8), 4, torch.float32),)
STRATEGIES = ("ddp", "fsdp")


def distribute(net: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    """Returns the network, distributed over all processes."""
    if strategy == "ddp":
        return DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    for layer in net.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(net)
    return net


def measure_step(case: Case, strategy: str, device: torch.device, repeat: int) -> float:
    torch.manual_seed(0)
    net = distribute(case.make().to(device), strategy, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    x = torch.rand(case.shape, device=device)
    labels = torch.randint(case.classes, (case.shape[1],), device=device)

    def step() -> None:
        reset_net(net)
        with torch.autocast(device.type, dtype=case.dtype, enabled=case.dtype != torch.float32):
            out: Tensor = net(x)
            loss = nn.functional.cross_entropy(out.mean(0).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(5):
        step()
    times = []
    for _ in range(repeat):
        synchronize(device)
        dist.barrier()
        begun = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def run_process(rank: int, count: int, folder: str, kind: str, repeat: int) -> None:
    """Runs one of `count` processes. Each process measures every case, and the first process writes the results."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    os.environ["LOCAL_RANK"] = str(rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting_{count}", rank=rank, world_size=count)
    cases = CASES if kind == "cuda" else SMALL
    seconds = [[measure_step(case, strategy, device, repeat) for strategy in STRATEGIES] for case in cases]
    if rank == 0:
        torch.save(seconds, f"{folder}/{count}.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scaling.md")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=30, help="number of measured steps")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to test this script")
    options = parser.parse_args()
    seconds_by_count = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in options.processes:
            spawn(run_process, (count, folder, options.device, options.repeat), nprocs=count)
            seconds_by_count[count] = torch.load(f"{folder}/{count}.pt")
    rows = []
    for i, case in enumerate(CASES if options.device == "cuda" else SMALL):
        for j, strategy in enumerate(STRATEGIES):
            first_seconds = seconds_by_count[options.processes[0]][i][j]
            for count in options.processes:
                seconds = seconds_by_count[count][i][j]
                rate = count * case.shape[1] / seconds
                rows.append(
                    (
                        case.name,
                        strategy,
                        count,
                        f"{1e3 * seconds:.2f}",
                        f"{rate:.0f}",
                        f"{first_seconds / seconds:.2f}",
                    )
                )
    lines = [
        "# Training on several GPUs",
        "",
        f"`python benchmarks/scaling.py --processes {' '.join(map(str, options.processes))}`: weak scaling. Each GPU",
        "has the batch in the name of the network. Neurons are LIF. SEW-ResNet18 runs under autocast to bfloat16, and",
        f"the feed-forward network in float32. Columns: the median of {options.repeat} steps in ms, samples per second",
        f"on all GPUs, and the throughput per GPU divided by the throughput per GPU with {options.processes[0]} GPU.",
        describe_machine(torch.device(options.device)),
        "",
        *table(("network", "parallel", "GPUs", "step", "samples / s", "efficiency"), rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
