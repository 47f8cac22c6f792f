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


def sum_of_forty(x: Tensor) -> Tensor:
    return sum([x] * 39, x)


def add_in_place(x: Tensor) -> Tensor:
    y = x.clone() if x.is_leaf else x
    return y.add_(y.detach().roll(1, -1))


def scale_without_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.5)
    return x


def subtract_from_data(x: Tensor) -> Tensor:
    x.data.sub_(0.5)
    return x


# Operations between two layers. Each operation keeps the shape.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "forty": sum_of_forty,
    "difference": lambda x: x - x.roll(1, 0),
    "scale": lambda x: x * 0.7,
    "half": lambda x: x / 2,
    "shift": lambda x: x + 0.25,
    "mask": lambda x: x * (x.flip(-1) > 0),
    "dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "mean": lambda x: nn.functional.avg_pool1d(x, 2, 1, 1)[..., 1:],
    "in place": add_in_place,
    "without a graph": scale_without_graph,
    "by data": subtract_from_data,
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
            y = neuron(self.apply_operations(layer(x), 2 * i))
            x = x + y if self.adds[i] else y
            x = self.apply_operations(x, 2 * i + 1)
        return x

    def apply_operations(self, x: Tensor, index: int) -> Tensor:
        for name in self.between[index]:
            x = STEPS[name](x)
        return x


def train_once(net: nn.Module, x: Tensor) -> list[Tensor]:
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
    expected = train_once(net, x)
    products = exact_products(net)
    largest = max(float(value.abs().max()) for value in expected)  # This scale also covers sums whose terms cancel.
    for _ in range(2):
        for value, expected_value in zip(train_once(net, x), expected, strict=True):
            scale = float(expected_value.abs().max()) + 0.1 * largest
            torch.testing.assert_close(
                value, expected_value, rtol=0, atol=1e-5 * scale, msg=f"{net.between}\n{products}"
            )


# -- two processes -----------------------------------------------------------------------------------------------------


def make_network() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), LIF(), nn.Linear(24, 16), LIF(), nn.Linear(16, 4))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(4)  # type: ignore[operator]
    functional.set_backend(net, "triton")
    return net


def make_batch() -> Tensor:
    return (torch.rand(3, 4, 16, generator=torch.Generator().manual_seed(1)) < 0.4).float()


def _run_process(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    net = make_network()
    products = exact_products(net, also=["0"])
    parallel = DistributedDataParallel(net)
    parallel(make_batch()[:, 2 * rank : 2 * rank + 2]).square().mean().backward()
    assert all(entry.exact for entry in products.layers), str(products)
    if rank == 0:
        torch.save([p.grad for p in net.parameters()], Path(folder) / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_gradients_of_two_processes_equal_those_of_one(tmp_path: Path) -> None:
    mp.spawn(_run_process, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
    net = make_network()
    net(make_batch()).square().mean().backward()
    for gradient, parameter in zip(torch.load(tmp_path / "gradients.pt"), net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
