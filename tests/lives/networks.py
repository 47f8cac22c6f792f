"""Small random networks built from a plan. Two networks built from the same plan are bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexsn_nn import (
    ALIF,
    CUBALIF,
    LI,
    LIF,
    PLIF,
    RALIF,
    RLIF,
    FlexSN,
    Izhikevich,
    OverTime,
    Recurrent,
    SlidingPSN,
    Synaptic,
)
from flexsn_nn.layer import Delay, SharedDropout
from flexsn_nn.surrogate import ATan, Sigmoid

CHANNELS = 4
# Shape of a step without its batch dimension.
FAMILIES: dict[str, tuple[int, ...]] = {"vector": (CHANNELS,), "image": (CHANNELS, 2, 3)}
# Weights are multiples of this number. So sums of a few weights are exact in any order and in every dtype used here.
GRID = 1 / 8


@dataclass(frozen=True)
class Plan:
    """Layers of a network, and the backend of its neurons.

    Attributes:
        family: a key of `FAMILIES`.
        layers: keys of `LAYERS`. `"+name"` adds the layer's input to its output.
        backend: backend of the compiled twin.
        launcher: `FLEXSN_LAUNCHER` during the acts of the compiled twin.
        device: device of both twins.
    """

    family: str
    layers: tuple[str, ...]
    backend: str = "auto"
    launcher: str = "auto"
    device: str = "cpu"


class Gained(nn.Module):
    """A step with a captured parameter that has one value per channel."""

    gain: nn.Parameter

    def __init__(self, family: str) -> None:
        super().__init__()
        shape = _channel_shape(family)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.25, CHANNELS).view(shape))
        self.spike = Sigmoid()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.75 * v + self.gain * x
        s = self.spike(h - 1.0)
        return s, h * (1 - s)


class TwoOutputs(nn.Module):
    """A step with two states and two outputs, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))
        self.spike = ATan()

    def forward(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = v + self.rate * (x - v) + 0.25 * w
        s = self.spike(h - 0.5)
        return s, (h > 0).to(h.dtype), h - 0.5 * s, torch.where(x > 1, self.rate * x, w)


class Sum(nn.Module):
    """The sum of the two outputs of a neuron."""

    def __init__(self, neuron: FlexSN) -> None:
        super().__init__()
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.neuron(x)
        total: Tensor = first + second
        return total


class Residual(nn.Module):
    """The sum of a layer's input and output, `x + layer(x)`, as in SEW blocks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.layer(x)
        return total


def _channel_shape(family: str) -> tuple[int, ...]:
    return (CHANNELS, *(1,) * (len(FAMILIES[family]) - 1))


def _make_delays(family: str) -> Tensor:
    return torch.linspace(0.25, 1.75, CHANNELS).view(_channel_shape(family))


def _make_gated(family: str) -> FlexSN:
    """Makes a neuron whose step is a function with a closure over a parameter and a tensor."""
    decay, bias = nn.Parameter(torch.full((1,), 0.5)), torch.full((1,), 0.125)
    spike = Sigmoid()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = decay * v + x + bias
        s = spike(h - 1.0)
        return s, h - s

    neuron = FlexSN(core, 1, 1, 1)
    neuron.register_parameter("decay", decay)
    return neuron


# Epsilon of norms. The variance of constant sequences is zero, and a small epsilon would multiply the rounding errors
# of their gradients by thousands.
EPS = 0.125

# Functions that make a layer for a family, by name. The inputs and outputs of layers are `[T, B, *FAMILIES[family]]`.
LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "lif": lambda family: LIF(),
    "lif soft": lambda family: LIF(v_reset=None, detach_reset=True),
    "lif learned": lambda family: LIF(
        tau=nn.Parameter(torch.full(_channel_shape(family), 2.0)), v_threshold=nn.Parameter(torch.tensor([0.75]))
    ),
    "plif": lambda family: PLIF(),
    "li": lambda family: LI(),
    "alif": lambda family: ALIF(tau_a=4.0, beta=0.5),
    "cubalif": lambda family: CUBALIF(),
    "synaptic": lambda family: Synaptic(alpha=0.5, beta=0.75),
    "izhikevich": lambda family: Izhikevich(),
    "gained": lambda family: FlexSN(Gained(family), 1, 1, 1),
    "closure": _make_gated,
    "two outputs": lambda family: Sum(FlexSN(TwoOutputs(), 1, 2, 2)),
    "wide": lambda family: LIF(precision="float32"),
    "delay": lambda family: Delay(1),
    "delays": lambda family: Delay(nn.Parameter(_make_delays(family)), max_delay=2),
    "sliding": lambda family: SlidingPSN(3),
    "dropout": lambda family: SharedDropout(0.5),
    "rlif": lambda family: RLIF(CHANNELS),
    "ralif": lambda family: RALIF(CHANNELS, tau_a=4.0, beta=0.5, bias=True),
    "recurrent": lambda family: Recurrent(LIF(), CHANNELS),
    "one to one": lambda family: RLIF(CHANNELS, all_to_all=False, V=0.25),
    "linear": lambda family: nn.Linear(CHANNELS, CHANNELS),
    "norm": lambda family: OverTime(nn.BatchNorm1d(CHANNELS, eps=EPS)),
    "conv": lambda family: OverTime(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)),
    "conv norm": lambda family: OverTime(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS, eps=EPS)
    ),
}
_VECTORS = {"rlif", "ralif", "recurrent", "one to one", "linear", "norm"}
_IMAGES = {"conv", "conv norm"}
WITH_STATE = tuple(name for name in LAYERS if name not in ("linear", "norm", "conv", "conv norm"))


def layers_for(family: str) -> list[str]:
    """Returns the names of layers that accept the steps of a family."""
    unsupported = _IMAGES if family == "vector" else _VECTORS
    return [name for name in LAYERS if name not in unsupported]


def build(plan: Plan) -> nn.Sequential:
    """Builds the network of a plan, with weights on a grid."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [_make_layer(name, plan.family) for name in plan.layers]
    net = nn.Sequential(*layers)
    to_grid(net)
    return net.to(plan.device)


def _make_layer(name: str, family: str) -> nn.Module:
    layer = LAYERS[name.removeprefix("+")](family)
    return Residual(layer) if name.startswith("+") else layer


@torch.no_grad()
def to_grid(net: nn.Module) -> None:
    """Rounds all parameters, in place, to multiples of `GRID` of moderate size.

    If a neuron takes the sigmoid of a parameter `w`, this `w` becomes a multiple of 1/2 between -1.5 and 1.5. For some
    other values, such as -1.75 and 0.3125, PyTorch's sigmoid of a single number and its sigmoid of a tensor differ in
    the last bit, and kernels may compute either.
    """
    logits = {id(module.w) for module in net.modules() if isinstance(module, PLIF)}
    for parameter in net.parameters():
        step, largest = (4 * GRID, 3) if id(parameter) in logits else (GRID, 16)
        parameter.copy_((parameter / step).round().clamp(-largest, largest) * step)
