"""Networks whose neurons compute norms: results equal those of the unchanged network."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from flexsn_nn import IF, LIF, PLIF, HandoverError, OverTime, UnknownNameError, functional
from flexsn_nn.fusion import FusedNorm, fuse_norms, unfuse_norms
from flexsn_nn.layer import MSBlock, NormNeuron, SEWBlock, ThresholdDependentBatchNorm2d
from flexsn_nn.monitor import SpikeMonitor


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_convolution(in_channels: int, out_channels: int) -> OverTime:
    return OverTime(nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels))


class Block(nn.Module):
    """Layers with a shortcut around them. The attributes of neurons have another order than the calls."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.second_neuron, self.first_neuron = LIF(v_threshold=0.4), PLIF(v_threshold=0.4)
        self.first, self.second = make_convolution(channels, channels), make_convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_neuron(self.first(x))
        y = self.second_neuron(self.second(y))
        assert isinstance(y, Tensor)
        return x + y


def make_network() -> nn.Sequential:
    return nn.Sequential(
        make_convolution(2, 4),
        LIF(v_threshold=0.4),
        Block(4),
        OverTime(nn.Conv2d(4, 3, 3), nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(3))),
        nn.Sequential(IF(v_threshold=0.4)),
        ThresholdDependentBatchNorm2d(3),
        LIF(v_threshold=0.4),
        nn.Flatten(2),
        nn.Linear(12, 5),
    )


PAIRS = {"0.1": "1", "2.first.1": "2.first_neuron", "2.second.1": "2.second_neuron", "3.1.1": "4.0", "5.0": "6"}


def run(net: nn.Module, x: Tensor) -> Any:
    functional.reset_net(net)
    return net(x)


def training_step(net: nn.Module, function: Any = run) -> dict[str, Tensor]:
    """Returns the output, the gradients, and the buffers."""
    torch.manual_seed(1)
    x = torch.randn(3, 2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    output = function(net, x)
    parameters = dict(net.named_parameters())
    gradients = torch.autograd.grad((output * torch.randn_like(output)).sum(), [x, *parameters.values()])
    return {"output": output, **dict(zip(["x", *parameters], gradients, strict=True)), **dict(net.named_buffers())}


def test_fused_norms_equal_the_unchanged_network_and_are_restored() -> None:
    unfused = make_network().double()
    fused = copy.deepcopy(unfused)
    report = fuse_norms(fused)
    assert {pair.norm: pair.neuron for pair in report.fused} == PAIRS
    assert not report.left
    assert report.fused[1] == FusedNorm("2.first.1", "2.first", "2.first_neuron")
    assert list(fused.state_dict()) == list(unfused.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in unfused.named_modules()]
    for _ in range(2):
        torch.testing.assert_close(training_step(fused), training_step(unfused))
    unfused.eval()
    fused.eval()
    torch.testing.assert_close(training_step(fused), training_step(unfused))
    assert fuse_norms(fused) == report  # A second call changes nothing.
    unfuse_norms(fused)
    for ours, theirs in zip(training_step(fused).values(), training_step(unfused).values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
def test_copies_of_fused_networks_return_equal_outputs() -> None:
    net = make_network()
    fuse_norms(net)
    x = torch.randn(3, 2, 2, 6, 6)
    run(net, x)
    net.eval()
    expected = run(net, x)
    loaded = make_network()
    fuse_norms(loaded)
    loaded.load_state_dict(net.state_dict())
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), loaded.eval()):
        with SpikeMonitor(twin) as monitor:
            assert torch.equal(run(twin, x), expected)
        assert monitor.sequence("2.first_neuron").shape == (3, 2, 4, 6, 6)
        assert torch.equal(run(net, x), expected)  # The original and the copy are independent.


def test_fused_layers_and_neurons_may_be_called_separately() -> None:
    """Checks that a fused layer returns the input of its norm, and that a neuron accepts inputs from other layers."""
    layer, neuron = make_convolution(2, 4), LIF()
    net = nn.Sequential(layer, neuron)
    fuse_norms(net)
    x = torch.randn(3, 2, 2, 6, 6)
    assert torch.equal(layer(x), OverTime(layer[0])(x))
    assert "the neuron after it computes" in repr(net)
    torch.testing.assert_close(layer[:](x), OverTime(*layer)(x))  # A slice of a layer is a separate layer.
    with pytest.raises(HandoverError, match="an input that is not that layer's output"):
        neuron(layer(x) + 1)
    neuron.reset()
    expected = LIF()(x)
    assert torch.equal(neuron(x), expected)  # No layer passed statistics to the neuron.


def test_a_compiled_fused_network_equals_the_unfused_network() -> None:
    net = make_network().double()
    for module in net.modules():
        if isinstance(module, LIF | PLIF | IF):
            module.backend = "hop"
    fuse_norms(net)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    twin = copy.deepcopy(net)
    unfuse_norms(twin)
    torch.testing.assert_close(training_step(net, compiled), training_step(twin))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.neuron = make_convolution(2, 2), LIF()

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = self.neuron(self.layer(x))
        return x


class OfTwoLayers(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.other = make_convolution(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.neuron(self.layer(x)) + self.neuron(self.other(x))


class Beside(Twice):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.neuron(y) + y.relu()


class InTraining(Twice):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.neuron(y) + y.mean() if self.training else self.neuron(y)


class OnData(Twice):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.neuron(y) if y.sum() > 0 else y


class Stored(Twice):
    def forward(self, x: Tensor) -> Any:
        self.seen = self.layer(x)
        return self.neuron(self.seen)


class Started(LIF):
    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        return [inputs[0][0]]


def make_hooked(owner: str) -> nn.Module:
    layer = make_convolution(2, 2)
    net = nn.Sequential(layer, LIF())
    module = {"norm": layer[1], "layer": layer, "neuron": net[1]}[owner]
    if owner == "neuron":
        module.register_forward_pre_hook(lambda module, args: None)
    else:
        module.register_forward_hook(lambda module, args, output: None)
    return net


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "called twice": (Twice, "called 2 times"),
    "a neuron of two layers": (OfTwoLayers, "its neuron neuron is called 2 times"),
    "a second reader": (Beside, "2 readers: neuron, relu()"),
    "another in training": (InTraining, "2 readers"),
    "control flow of data": (OnData, "cannot be traced"),
    "no neuron": (lambda: nn.Sequential(make_convolution(2, 2), nn.ReLU()), "goes to 1, which is not a neuron"),
    "the last layer": (lambda: make_convolution(2, 2), "no traced forward calls its layer"),
    "not the last": (lambda: OverTime(nn.BatchNorm2d(2), nn.ReLU()), "not the last layer of an OverTime"),
    "a residual": (lambda: MSBlock(2, 2, IF), "goes to add(), which is not a neuron"),
    "hooks of the norm": (lambda: make_hooked("norm"), "it has hooks"),
    "hooks of the layer": (lambda: make_hooked("layer"), "its layer has a forward hook"),
    "hooks of the neuron": (lambda: make_hooked("neuron"), "forward pre-hook"),
    "initial states": (lambda: nn.Sequential(make_convolution(2, 2), Started()), "overrides init_states"),
    "step modes": (lambda: nn.Sequential(make_convolution(2, 2), LIF(step_mode="s")), "its layer has step_mode='m'"),
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("case", LEFT)
def test_unfused_layers_have_a_reason(case: str) -> None:
    make, reason = LEFT[case]
    net = make()
    x = torch.randn(3, 2, 2, 6, 6)
    report = fuse_norms(net)
    assert report.left
    assert any(reason in left.reason for left in report.left), str(report)
    if case in ("step modes", "initial states"):
        return
    torch.manual_seed(0)
    twin = make()
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(net(x), twin(x))
    assert all(not isinstance(value, torch.fx.Proxy) for module in net.modules() for value in vars(module).values())


def test_attributes_that_forward_stores_are_removed_after_tracing() -> None:
    net = Stored()
    assert len(fuse_norms(net).fused) == 1
    assert not hasattr(net, "seen")


def test_blocks_are_fused_except_before_sums() -> None:
    net = nn.Sequential(SEWBlock(2, 3, IF), MSBlock(3, 4, IF))
    report = fuse_norms(net)
    assert len(report.fused) == 4
    assert str(report).splitlines()[0] == "4 of 6 batch norms are computed by neurons"
    assert all("add()" in left.reason for left in report.left)


def test_skipped_layers_are_not_fused() -> None:
    net = make_network()
    report = fuse_norms(net, skip=["1", "2.first", "5.0"])
    assert [pair.norm for pair in report.fused] == ["2.second.1", "3.1.1"]
    assert {left.reason for left in report.left} == {"it is in skip"}
    with pytest.raises(UnknownNameError):
        fuse_norms(net, skip=["first"])
    assert not fuse_norms(nn.Sequential(NormNeuron(nn.BatchNorm2d(2), LIF()))).left


class Positions(nn.Module):
    """A module that makes tensors from sizes, or from values that depend on data."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.layer, self.neuron = make, make_convolution(2, 4), LIF()

    def forward(self, x: Tensor) -> Any:
        return self.neuron(self.layer(x + self.make(x)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.linspace(0, 1, x.shape[-1]),
        lambda x: torch.zeros(x.shape[0], 1, 1, 1, 1),
        lambda x: torch.arange(x.size(-1)),
        lambda x: torch.full((6,), x.mean()),
    ],
    ids=["linspace", "zeros", "arange", "full"],
)
def test_a_forward_that_makes_tensors_from_sizes_is_traced_or_refused(make: Callable[[Tensor], Tensor]) -> None:
    fused = fuse_norms(Positions(make))
    assert len(fused.fused) + len(fused.left) == 1


class SizedByValue(nn.Module):
    """A module that uses a tensor's value as a size, in a function that also calls `isinstance`."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.neuron, self.make = make_convolution(2, 4), LIF(), make

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        make, count = self.make, x.sum().int()
        mask = torch.zeros(count) if make is torch.zeros else torch.Tensor(count) if make is None else make(count)  # type: ignore[call-overload]
        assert isinstance(mask, Tensor)
        y: Tensor = self.neuron(self.layer(x))
        return y * mask.sum()


@pytest.mark.parametrize("make", [torch.zeros, None, torch.arange, lambda n: torch.ones(4)[:n]])
def test_a_value_as_a_size_does_not_end_the_process(make: Any) -> None:
    """Checks that `torch.zeros` receives no traced value as a size, since it would read memory at a wrong address."""
    net = SizedByValue(make)
    report = fuse_norms(net)
    assert len(report.fused) + len(report.left) == 1
    assert not report.left or "cannot be traced" in str(report)
