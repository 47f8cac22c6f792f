"""Data-parallel training: two processes with half a batch each step like one process with all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flexsn_nn import LIF, PLIF
from flexsn_nn.functional import reset_net


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), PLIF(), nn.Linear(6, 3), LIF())


def batch() -> Tensor:
    return 2 * torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))


def train(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Two steps; the parameters after them."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for _ in range(2):
        reset_net(network)
        optimizer.zero_grad()
        network(x).sum((0, 2)).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def work(rank: int, folder: str) -> None:
    """One of two processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    parameters = train(DistributedDataParallel(make_network()), batch()[:, 4 * rank : 4 * rank + 4])
    torch.save(parameters, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or sys.platform == "win32", reason="torch without gloo")
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code = f"import test_nn_distributed as t, sys; t.work(int(sys.argv[1]), {str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    finally:  # each waits for the other
        for process in processes:
            process.kill()
    wanted = train(make_network(), batch())
    before = [parameter.detach() for parameter in make_network().parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(wanted, before, strict=True)), "every parameter should move"
    for rank in range(2):
        for got, value in zip(torch.load(tmp_path / f"{rank}.pt"), wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
