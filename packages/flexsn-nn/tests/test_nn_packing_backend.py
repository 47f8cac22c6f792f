"""Compiled graphs that store spikes as bits: gradients are equal, and the graph stores fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import IF, LIF, FlexSN, OverTime, functional
from flexsn_nn.memory import PackingBackend

PARTITIONED = "aot_eager_decomp_partition"  # This backend uses Inductor's partition into forward and backward.


Kept = list[tuple[int, torch.dtype]]


def trained(net: nn.Module, x: Tensor, backend: Any, **options: Any) -> tuple[list[Tensor], Kept]:
    """Returns the gradients of input and parameters, and the size and dtype of each stored value."""
    functional.reset_net(net)
    torch.compiler.reset()
    kept: Kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = torch.compile(net, backend=backend, **options)(x)
    return list(torch.autograd.grad(out.square().sum(), [x, *net.parameters()])), kept


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OverTime(nn.Conv2d(2, 3, 3)),
        LIF(v_threshold=0.1),
        OverTime(nn.Conv2d(3, 6, 3, padding=1, stride=(2, 1), groups=3)),
        IF(v_threshold=0.1),
        nn.Flatten(2),
        nn.Linear(6 * 2 * 3, 3),
    )


@pytest.mark.parametrize("backend", [PARTITIONED, "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.long(all_but=["False-memory_format1-False-aot*"])
def test_layers_keep_bits(backend: str, autocast: bool, memory_format: torch.memory_format, dynamic: bool) -> None:
    net = convolutional().to(memory_format=memory_format)
    x = torch.rand(15, 2, 5, 5).mul(4).contiguous(memory_format=memory_format).unflatten(0, (5, 3)).requires_grad_()
    packing = PackingBackend(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        wanted, whole = trained(net, x, backend, dynamic=dynamic)
        got, kept = trained(net, x, packing, dynamic=dynamic)
    assert packing.layers == 2
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) if backend == PARTITIONED else torch.allclose(a, b, rtol=1e-2 if autocast else 1e-5)
    assert all(gradient.abs().max() > 0 for gradient in got)
    sizes = [15 * 3 * 3 * 3, 15 * 6 * 2 * 3]
    assert [(-(-size // 8), torch.uint8) for size in sizes] == [one for one in kept if one[1] == torch.uint8]
    assert not any(dtype == torch.uint8 for _, dtype in whole)
    assert len(kept) == len(whole)


def doubled(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * (x > v).to(x.dtype), v


def written_to(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    spike = (x > v).to(x.dtype)
    spike.mul_(2)
    return spike, v


def part(spikes: Tensor) -> Tensor:
    spikes.view(-1)[:3].mul_(2)
    return spikes


def copied(spikes: Tensor) -> Tensor:
    other = spikes.clone()
    other += 1
    return other


Between = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[FlexSN, Between, int]] = {
    "spikes": (LIF(), lambda spikes: spikes, 1),
    "moved": (LIF(), lambda spikes: spikes.transpose(0, 1).flatten(0, 1), 1),
    "no comparison": (FlexSN(doubled, 1, 1, 1), lambda spikes: spikes, 0),
    "written to in the step": (FlexSN(written_to, 1, 1, 1), lambda spikes: spikes, 0),
    "written to": (LIF(), part, 0),
    "a copy, written to": (LIF(), copied, 0),
    "scaled": (LIF(), lambda spikes: spikes * 2, 0),
    "its state": (LIF(), lambda spikes: spikes, 0),
}


class Network(nn.Module):
    def __init__(self, neuron: FlexSN, between: Between, of_state: bool) -> None:
        super().__init__()
        self.neuron, self.between, self.of_state = neuron, between, of_state
        self.layer = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        value = self.neuron.states[0] if self.of_state else self.between(spikes)
        out: Tensor = self.layer(value)
        return out


@pytest.mark.parametrize("what", CASES)
@pytest.mark.long(all_but=["written to", "no comparison"])
def test_layers_of_all_kinds_keep_bits(what: str) -> None:
    neuron, between, layers = CASES[what]
    packing = PackingBackend("eager")
    net = Network(neuron, between, what == "its state")
    torch.compiler.reset()
    x = 3 * torch.rand(3, 2, 16)
    with torch.no_grad():
        out = torch.compile(net, backend=packing, fullgraph=True)(x)
    assert packing.layers == layers
    functional.reset_net(net)
    with torch.no_grad():
        assert torch.equal(out, net(x))
