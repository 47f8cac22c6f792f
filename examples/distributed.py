"""Trains on several GPUs, processes or machines, with data parallelism or full sharding, and with checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py [--strategy ddp|fsdp] [--checkpoint DIR]

To use several machines, start the script on each of them, with torchrun's options --nnodes and --rdzv-endpoint. Without
a GPU, the processes communicate through gloo. The data are scikit-learn's handwritten digits. Each process trains on
its part of every batch. With `--checkpoint DIR`, the network and the optimizer are written to DIR/epoch_N after each
epoch, and a run resumes from the last complete checkpoint. The resumed run may have another number of processes.
All machines need access to DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flexsn_nn import LIF, PLIF, OverTime, functional, loss


def network(backend: str) -> nn.Sequential:
    """Returns a network from `[T, B, 1, 8, 8]` to `[T, B, 10]`."""
    return nn.Sequential(
        OverTime(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)),
        PLIF(backend=backend),
        OverTime(nn.MaxPool2d(2)),
        nn.Flatten(2),
        nn.Linear(16 * 4 * 4, 10),
        LIF(backend=backend),
    )


def distributed(net: nn.Sequential, strategy: str, device: torch.device) -> nn.Module:
    """Wraps the network for data parallelism, or shards its parameters over the processes."""
    if device.type == "cuda":  # on GPUs, batch norms can compute their statistics over the batches of all processes
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = net.to(device)
    if strategy == "ddp":
        return DistributedDataParallel(net)
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(net)
    return net


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16.0, labels, test_size=0.2, random_state=seed, stratify=labels)
    train_x, test_x = (torch.tensor(p, dtype=torch.float32).view(-1, 1, 8, 8) for p in parts[:2])
    train_y, test_y = (torch.tensor(p) for p in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def current(images: Tensor, steps: int) -> Tensor:
    """Returns the images, multiplied by two, as a constant current over all steps. The steps are views."""
    return (2 * images).expand(steps, *images.shape)


def train(
    net: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, steps: int, device: torch.device
) -> float:
    """Trains for one epoch, and returns the mean loss over all processes."""
    net.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        functional.reset_net(net)
        value = loss.ce_count_loss(net(current(images.to(device), steps)), labels.to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += value.detach()
    total /= len(loader)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@torch.no_grad()
def accuracy(net: nn.Module, loader: DataLoader[Any], steps: int, device: torch.device) -> float:
    """Returns the accuracy over the images of all processes."""
    net.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        functional.reset_net(net)
        answers = net(current(images.to(device), steps)).sum(0).argmax(1)
        counts += torch.tensor([float((answers == labels.to(device)).sum()), len(labels)], device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def keep(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model, optim = get_state_dict(net, optimizer)
    save({"model": model, "optimizer": optim}, checkpoint_id=folder)


def resume(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model, optim = get_state_dict(net, optimizer)
    load({"model": model, "optimizer": optim}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)


def epochs_in(folder: Path | None) -> int:
    """Returns the number of epochs in the last complete checkpoint, or 0 without a checkpoint."""
    # The metadata are written last, so a checkpoint with metadata is complete.
    paths = [] if folder is None else folder.glob("epoch_*/.metadata")
    return max((int(path.parent.name.removeprefix("epoch_")) for path in paths), default=0)


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="distributed", description="Trains on several processes.")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="how the network is distributed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--steps", type=int, default=8, help="time steps per image")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all processes")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints after each epoch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def fail(message: str) -> NoReturn:
    print(f"distributed: {message}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str]) -> int:
    settings = options(arguments)
    if "RANK" not in os.environ:
        fail("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/distributed.py")
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return run(settings, device)
    finally:
        dist.destroy_process_group()


def run(settings: argparse.Namespace, device: torch.device) -> int:
    rank, count = dist.get_rank(), dist.get_world_size()
    if settings.batch % count:
        fail(f"--batch {settings.batch} cannot be shared by {count} processes")
    torch.manual_seed(settings.seed)
    net = distributed(network(settings.backend), settings.strategy, device)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    begin = epochs_in(settings.checkpoint)
    if begin:
        resume(net, optimizer, settings.checkpoint / f"epoch_{begin}")
    training, held_out = load_data(settings.seed)
    sampler: DistributedSampler[Any] = DistributedSampler(training, seed=settings.seed)
    loader = DataLoader(training, settings.batch // count, sampler=sampler, drop_last=True)
    # Each process evaluates every `count`-th image, so that each image is evaluated once.
    part = torch.utils.data.Subset(held_out, range(rank, len(held_out), count))
    held_out_accuracy = accuracy(net, DataLoader(part, 256), settings.steps, device)
    if begin and rank == 0:
        print(f"resumed after {begin} epochs, accuracy {held_out_accuracy:.2%}")
    for epoch in range(begin, settings.epochs):
        sampler.set_epoch(epoch)
        mean = train(net, loader, optimizer, settings.steps, device)
        held_out_accuracy = accuracy(net, DataLoader(part, 256), settings.steps, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{settings.epochs}  loss {mean:.4f}  held-out accuracy {held_out_accuracy:.2%}")
        if settings.checkpoint is not None:
            keep(net, optimizer, settings.checkpoint / f"epoch_{epoch + 1}")
    if rank == 0:
        print(f"held-out accuracy {held_out_accuracy:.2%} on {count} processes ({settings.strategy})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
