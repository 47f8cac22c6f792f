"""Random networks whose ranges are hard to derive, with and without exact products; gradients of two processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flexsn_nn import ILIF, LIF, TernaryLIF, exact_products, functional, on_grid

pytestmark = pytest.mark.usefixtures("interpreted")
FEATURES = 16


def many(x: Tensor) -> Tensor:
    return sum([x] * 39, x)


def in_place(x: Tensor) -> Tensor:
    y = x.clone() if x.is_leaf else x
    return y.add_(y.detach().roll(1, -1))


def quiet(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.5)
    return x


def by_data(x: Tensor) -> Tensor:
    x.data.sub_(0.5)
    return x


# Operations between two layers. Each operation keeps the shape.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "forty": many,
    "difference": lambda x: x - x.roll(1, 0),
    "scale": lambda x: x * 0.7,
    "half": lambda x: x / 2,
    "shift": lambda x: x + 0.25,
    "mask": lambda x: x * (x.flip(-1) > 0),
    "dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "mean": lambda x: nn.functional.avg_pool1d(x, 2, 1, 1)[..., 1:],
    "in place": in_place,
    "without a graph": quiet,
    "by data": by_data,
    "view": lambda x: x.flatten(0, 1).view(x.shape),
    "order": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "cut": lambda x: torch.cat([x[:2], x[2:]]),
    "square": lambda x: x * x,
    "detached": lambda x: x.detach() + x,
}
NEURONS: tuple[Callable[[], nn.Module], ...] = (LIF, TernaryLIF, ILIF)


class Random(nn.Module):
    """Layers and neurons with random operations between them, and residual sums."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=rng.random() < 0.7) for _ in range(3))
        self.neurons = nn.ModuleList(rng.choice(NEURONS)() for _ in range(3))
        self.between = [rng.sample(sorted(STEPS), rng.choice((0, 0, 1, 2))) for _ in range(6)]
        self.adds = [rng.random() < 0.3 for _ in range(3)]
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.6)  # type: ignore[arg-type]
        if rng.random() < 0.3:
            on_grid(self.layers[rng.randrange(3)], largest_input=100)

    def forward(self, x: Tensor) -> Tensor:
        for i, (layer, neuron) in enumerate(zip(self.layers, self.neurons, strict=True)):
            y = neuron(self.passed(layer(x), 2 * i))
            x = x + y if self.adds[i] else y
            x = self.passed(x, 2 * i + 1)
        return x

    def passed(self, x: Tensor, place: int) -> Tensor:
        for name in self.between[place]:
            x = STEPS[name](x)
        return x


def trained(net: nn.Module, x: Tensor) -> list[Tensor]:
    functional.reset_net(net)
    torch.manual_seed(3)
    y = net(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
    return [y.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.long(all_but=[str(seed) for seed in range(2)])
def test_random_networks_are_exact_or_unchanged(seed: int) -> None:
    torch.manual_seed(seed)
    net = Random(seed)
    functional.set_backend(net, "triton")
    x = torch.randn(4, 3, FEATURES, generator=torch.Generator().manual_seed(seed))
    want = trained(net, x)
    products = exact_products(net)
    largest = max(float(one.abs().max()) for one in want)  # This scale also covers sums whose terms cancel.
    for _ in range(2):
        for one, other in zip(trained(net, x), want, strict=True):
            scale = float(other.abs().max()) + 0.1 * largest
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale, msg=f"{net.between}\n{products}")


# -- two processes -----------------------------------------------------------------------------------------------------


def network() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), LIF(), nn.Linear(24, 16), LIF(), nn.Linear(16, 4))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(4)  # type: ignore[operator]
    functional.set_backend(net, "triton")
    return net


def batch() -> Tensor:
    return (torch.rand(3, 4, 16, generator=torch.Generator().manual_seed(1)) < 0.4).float()


def _one_of_two(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    net = network()
    products = exact_products(net, also=["0"])
    parallel = DistributedDataParallel(net)
    parallel(batch()[:, 2 * rank : 2 * rank + 2]).square().mean().backward()
    assert all(one.exact for one in products.layers), str(products)
    if rank == 0:
        torch.save([p.grad for p in net.parameters()], Path(folder) / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_gradients_of_two_processes(tmp_path: Path) -> None:
    mp.spawn(_one_of_two, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
    net = network()
    net(batch()).square().mean().backward()
    for one, other in zip(torch.load(tmp_path / "gradients.pt"), net.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)
