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


SavedValues = list[tuple[int, torch.dtype]]


def train_once(net: nn.Module, x: Tensor, backend: Any, **options: Any) -> tuple[list[Tensor], SavedValues]:
    """Returns the gradients of input and parameters, and the size and dtype of each stored value."""
    functional.reset_net(net)
    torch.compiler.reset()
    saved: SavedValues = []

    def note(tensor: Tensor) -> Tensor:
        saved.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = torch.compile(net, backend=backend, **options)(x)
    return list(torch.autograd.grad(out.square().sum(), [x, *net.parameters()])), saved


def make_convolutional() -> nn.Sequential:
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
def test_layers_store_bits(backend: str, autocast: bool, memory_format: torch.memory_format, dynamic: bool) -> None:
    net = make_convolutional().to(memory_format=memory_format)
    x = torch.rand(15, 2, 5, 5).mul(4).contiguous(memory_format=memory_format).unflatten(0, (5, 3)).requires_grad_()
    packing = PackingBackend(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected, saved_unpacked = train_once(net, x, backend, dynamic=dynamic)
        gradients, saved = train_once(net, x, packing, dynamic=dynamic)
    assert packing.layers == 2
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b) if backend == PARTITIONED else torch.allclose(a, b, rtol=1e-2 if autocast else 1e-5)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    sizes = [15 * 3 * 3 * 3, 15 * 6 * 2 * 3]
    assert [(-(-size // 8), torch.uint8) for size in sizes] == [value for value in saved if value[1] == torch.uint8]
    assert not any(dtype == torch.uint8 for _, dtype in saved_unpacked)
    assert len(saved) == len(saved_unpacked)


def fire_twos(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * (x > v).to(x.dtype), v


def fire_twos_in_place(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    spike = (x > v).to(x.dtype)
    spike.mul_(2)
    return spike, v


def double_part(spikes: Tensor) -> Tensor:
    spikes.view(-1)[:3].mul_(2)
    return spikes


def add_to_copy(spikes: Tensor) -> Tensor:
    other = spikes.clone()
    other += 1
    return other


Function = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[FlexSN, Function, int]] = {
    "spikes": (LIF(), lambda spikes: spikes, 1),
    "moved": (LIF(), lambda spikes: spikes.transpose(0, 1).flatten(0, 1), 1),
    "no comparison": (FlexSN(fire_twos, 1, 1, 1), lambda spikes: spikes, 0),
    "written to in the step": (FlexSN(fire_twos_in_place, 1, 1, 1), lambda spikes: spikes, 0),
    "written to": (LIF(), double_part, 0),
    "a copy, written to": (LIF(), add_to_copy, 0),
    "scaled": (LIF(), lambda spikes: spikes * 2, 0),
    "its state": (LIF(), lambda spikes: spikes, 0),
}


class Network(nn.Module):
    def __init__(self, neuron: FlexSN, between: Function, of_state: bool) -> None:
        super().__init__()
        self.neuron, self.between, self.of_state = neuron, between, of_state
        self.layer = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        value = self.neuron.states[0] if self.of_state else self.between(spikes)
        out: Tensor = self.layer(value)
        return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long(all_but=["written to", "no comparison"])
def test_only_unchanged_spikes_are_stored_as_bits(case: str) -> None:
    neuron, between, layers = CASES[case]
    packing = PackingBackend("eager")
    net = Network(neuron, between, case == "its state")
    torch.compiler.reset()
    x = 3 * torch.rand(3, 2, 16)
    with torch.no_grad():
        out = torch.compile(net, backend=packing, fullgraph=True)(x)
    assert packing.layers == layers
    functional.reset_net(net)
    with torch.no_grad():
        assert torch.equal(out, net(x))
