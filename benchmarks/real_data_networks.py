"""Networks of `real_data.py`, in this project and in two other libraries. The parameters of each pair of networks have
the same shapes and the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexsn_nn import LIF, Leaky, OverTime, RLeaky, functional, surrogate

CHANNELS, HIDDEN, BETA, SLOW = 25, 64, 0.5, 0.9


class Network(nn.Module):
    """A network that maps samples `[T, B, ...]` and lengths `[B]` to scores `[B, classes]`."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError


def average_steps(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns the means of `[T, B, C]` over the steps of each sequence, as `[B, C]`."""
    steps = torch.arange(len(values), device=values.device)
    counts = (steps[:, None] < lengths).unsqueeze(2)
    return torch.where(counts, values, 0.0).sum(0) / lengths.unsqueeze(1)


def make_convolutions() -> list[nn.Module]:
    """Returns the convolutions that the authors of MNIST-1D use. Their results have `CHANNELS` channels and the lengths
    19, 10 and 5, for an input of the length 40.
    """
    return [
        nn.Conv1d(1, CHANNELS, 5, stride=2, padding=1),
        nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
        nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
    ]


class _Ours(Network):
    """Layers that run on sequences, followed by the mean over time."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        functional.reset_net(self)
        return average_steps(self.layers(x), lengths)


class OurDigits(_Ours):
    """Two layers of `LIF`."""

    def __init__(self) -> None:
        def lif() -> LIF:
            return LIF(tau=2.0, surrogate_function=surrogate.ATan())

        super().__init__(nn.Linear(64, 128), lif(), nn.Linear(128, 10), lif())


class OurConvolutions(_Ours):
    """Three convolutions, each followed by `Leaky`."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for conv in make_convolutions():
            layers += [OverTime(conv), Leaky(BETA)]
        super().__init__(*layers, nn.Flatten(2), nn.Linear(5 * CHANNELS, 10))


class OurRecurrent(_Ours):
    """A layer of `RLeaky`."""

    def __init__(self, channels: int, classes: int) -> None:
        neuron = RLeaky(SLOW, linear_features=HIDDEN)
        super().__init__(nn.Linear(channels, HIDDEN), neuron, nn.Linear(HIDDEN, classes))


class OurLayers(_Ours):
    """Two layers of `Leaky`."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(
            nn.Linear(channels, HIDDEN), Leaky(SLOW), nn.Linear(HIDDEN, HIDDEN), Leaky(SLOW), nn.Linear(HIDDEN, classes)
        )


class SpikingJellyDigits(Network):
    """`OurDigits` in SpikingJelly."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron
        from spikingjelly.activation_based import surrogate as theirs

        def lif() -> nn.Module:
            node: nn.Module = neuron.LIFNode(tau=2.0, surrogate_function=theirs.ATan(), step_mode="m")
            return node

        self.layers = nn.Sequential(nn.Linear(64, 128), lif(), nn.Linear(128, 10), lif())

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        from spikingjelly.activation_based import functional as theirs

        theirs.reset_net(self)
        return average_steps(self.layers(x), lengths)


class SnnTorchConvolutions(Network):
    """`OurConvolutions` in snnTorch, which steps through time in Python."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.convolutions = nn.ModuleList(make_convolutions())
        self.last = nn.Linear(5 * CHANNELS, 10)
        self.neurons = nn.ModuleList(snntorch.Leaky(BETA, spike_grad=snntorch.surrogate.atan()) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        membranes = [neuron.init_leaky() for neuron in self.neurons]  # type: ignore[operator]
        outputs = []
        for spikes in x:
            for i, (conv, neuron) in enumerate(zip(self.convolutions, self.neurons, strict=True)):
                spikes, membranes[i] = neuron(conv(spikes), membranes[i])
            outputs.append(self.last(spikes.flatten(1)))
        return average_steps(torch.stack(outputs), lengths)


class SnnTorchRecurrent(Network):
    """`OurRecurrent` in snnTorch."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        import snntorch

        self.first = nn.Linear(channels, HIDDEN)
        self.neuron = snntorch.RLeaky(SLOW, linear_features=HIDDEN, spike_grad=snntorch.surrogate.atan())
        self.last = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        spikes, membrane = self.neuron.init_rleaky()
        outputs = []
        for step in self.first(x):
            spikes, membrane = self.neuron(step, spikes, membrane)
            outputs.append(self.last(spikes))
        return average_steps(torch.stack(outputs), lengths)


class SnnTorchLayers(Network):
    """`OurLayers` in snnTorch."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        import snntorch

        self.layers = nn.ModuleList((nn.Linear(channels, HIDDEN), nn.Linear(HIDDEN, HIDDEN)))
        self.last = nn.Linear(HIDDEN, classes)
        self.neurons = nn.ModuleList(snntorch.Leaky(SLOW, spike_grad=snntorch.surrogate.atan()) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        membranes = [neuron.init_leaky() for neuron in self.neurons]  # type: ignore[operator]
        outputs = []
        for spikes in x:
            for i, (linear, neuron) in enumerate(zip(self.layers, self.neurons, strict=True)):
                spikes, membranes[i] = neuron(linear(spikes), membranes[i])
            outputs.append(self.last(spikes))
        return average_steps(torch.stack(outputs), lengths)
