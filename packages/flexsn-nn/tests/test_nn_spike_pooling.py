"""Layers that pool with kernels: equal results, reasons for layers without kernels, ranges of spikes, and `undo`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, OverTime, UnknownNameError, functional, plain_pooling, spike_pooling
from flexsn_nn.memory import PackedSpikes

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "max 2d": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 9, 8)),
    "max 2d, oblong": (lambda: nn.MaxPool2d((3, 2), padding=(1, 0), dilation=(2, 1), ceil_mode=True), (2, 3, 9, 8)),
    "max 1d": (lambda: nn.MaxPool1d(3, 2, 1), (2, 3, 11)),
    "average 2d": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 3, 9, 8)),
    "average 2d, divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), (2, 3, 9, 8)),
    "average 1d": (lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True), (2, 3, 11)),
}


def make_network(pool: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    convolution = OverTime(nn.Conv2d(2, 4, 3, padding=1, bias=False))
    return nn.Sequential(convolution, LIF(), OverTime(pool), OverTime(nn.Conv2d(4, 3, 3, bias=False)))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_pooling_layer_equals_that_of_torch(kind: str) -> None:
    make, shape = LAYERS[kind]
    layer = make()
    pooling = spike_pooling(layer)
    x = (torch.rand(shape) < 0.3).float()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = layer(ours), make()(theirs)
    torch.testing.assert_close(output, expected)
    grad = torch.randn(output.shape)
    torch.testing.assert_close(torch.autograd.grad(output, ours, grad), torch.autograd.grad(expected, theirs, grad))
    assert [entry.account for entry in pooling.layers] == ["by a kernel"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_converted_network_learns_like_the_original(channels_last: bool) -> None:
    net = make_network(nn.MaxPool2d(3, 2, 1))
    plain = copy.deepcopy(net)
    names = list(net.state_dict())
    pooling = spike_pooling(net)
    assert "not called yet" in str(pooling)
    x = torch.rand(3, 2, 2, 8, 7)
    if channels_last:
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    output, expected = net(x), plain(x)
    assert torch.equal(output, expected)
    assert output.stride() == expected.stride()
    output.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert list(net.state_dict()) == names
    assert str(pooling) == "1 of 1 layers pooled by a kernel\n  2.0: by a kernel"


@pytest.mark.usefixtures("interpreted")
def test_ranges_of_spikes_pass_through_pooling() -> None:
    net = make_network(nn.MaxPool2d(2))
    spike_pooling(net)
    with PackedSpikes(net) as packing:
        loss = net(torch.rand(3, 2, 2, 8, 8)).sum()
    assert packing.bytes_whole == 3 * 2 * 4 * 4 * 4 * 4  # Without packing, the second convolution would store them.
    assert packing.kept_whole == []
    loss.backward()


@pytest.mark.usefixtures("interpreted")
def test_single_steps_and_compiled_calls_equal_a_sequence() -> None:
    net = make_network(nn.MaxPool2d(3, 2, 1)).eval()
    spike_pooling(net)
    x = torch.rand(3, 2, 2, 8, 7)
    expected = net(x)
    functional.reset_net(net)
    functional.set_step_mode(net, "s")
    torch.testing.assert_close(torch.stack([net(step) for step in x]), expected)
    functional.reset_net(net)
    functional.set_step_mode(net, "m")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(net, backend="eager")(x), expected)


class OwnPool(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = super().forward(input)
        return result + 1


def test_layers_without_kernels_have_a_reason() -> None:
    net = nn.Sequential(
        nn.MaxPool2d(2, return_indices=True), OwnPool(2), nn.AdaptiveAvgPool2d(1), nn.MaxPool3d(2), nn.MaxPool2d(2)
    )
    pooling = spike_pooling(net, skip=["4"])
    assert [entry.account for entry in pooling.layers] == [
        "it returns indices",
        "OwnPool overrides forward",
        "there is no kernel for AdaptiveAvgPool2d",
        "there is no kernel for MaxPool3d",
        "it is in skip",
    ]
    assert not any("forward" in vars(module) for module in net)
    with pytest.raises(UnknownNameError):
        spike_pooling(net, skip=["5"])


def test_inputs_without_kernels_have_a_reason() -> None:
    layer = nn.MaxPool2d(2)
    pooling = spike_pooling(layer)
    x = torch.rand(3, 8, 8)
    assert torch.equal(layer(x), nn.MaxPool2d(2)(x))
    assert [(entry.by_kernel, entry.account) for entry in pooling.layers] == [(False, "its input has 3 dimensions")]
    integers = torch.randint(0, 9, (2, 3, 8, 8))
    assert torch.equal(layer(integers), nn.MaxPool2d(2)(integers))
    assert [entry.account for entry in pooling.layers] == ["its input is torch.int64"]


def test_the_replacement_of_forward_is_undone() -> None:
    net = make_network(nn.MaxPool2d(2))
    pooling = spike_pooling(net)
    spike_pooling(net)  # A second call replaces the first.
    assert sum("forward" in vars(module) for module in net.modules()) == 1
    twin = copy.deepcopy(net)
    pooling.undo()
    assert not any("forward" in vars(module) for module in net.modules())
    plain_pooling(twin)
    assert not any("forward" in vars(module) for module in twin.modules())
