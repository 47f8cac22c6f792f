"""Residual blocks of spiking networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from flexsn_nn._checks import check_count, check_name
from flexsn_nn._over_time import OverTime
from flexsn_nn.errors import ParameterError

Connect = Callable[[Tensor, Tensor], Tensor]


class SEWBlock(nn.Module):
    """A block that computes `g(A(x), x)`: it combines the spikes of a branch `A` with the incoming spikes elementwise.

    The branch consists of a 3x3 convolution, a batch norm and a neuron, followed by the same three layers again.
    `g(a, x)` is `a + x` ("add"), `a x` ("and") or `(1 - a) x` ("iand"). If `stride` is not 1, or if the number of
    channels changes, `x` first passes through a separate 1x1 convolution, batch norm and neuron. Otherwise, `x` reaches
    `g` unchanged. A network of such blocks can therefore represent the identity at any depth.

    Args:
        in_channels, out_channels: channels of `[T, B, C, H, W]`.
        neuron: function that returns a new neuron, for example `lambda: LIF(surrogate_function=ATan())`.
        stride: stride of the first convolution.
        connect: `"add"`, `"and"` or `"iand"`.

    Raises:
        UnknownNameError: `connect` is unknown.
        ParameterError: `neuron` does not return a new module in each call, or a size is below 1.

    Source: Fang et al., "Deep residual learning in spiking neural networks", NeurIPS 2021.
    """

    CONNECT: ClassVar[dict[str, Connect]] = {
        "add": lambda a, x: a + x,
        "and": lambda a, x: a * x,
        "iand": lambda a, x: (1 - a) * x,
    }

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        neuron: Callable[[], nn.Module],
        stride: int = 1,
        connect: str = "add",
    ) -> None:
        super().__init__()
        check_name("connect", connect, self.CONNECT)
        self.connect = connect
        makes_shortcut = stride != 1 or in_channels != out_channels
        _check_sizes(in_channels, out_channels, stride)
        first, second, *third = _create_neurons(neuron, 3 if makes_shortcut else 2)
        self.branch = nn.Sequential(
            _create_conv(in_channels, out_channels, 3, stride),
            first,
            _create_conv(out_channels, out_channels, 3),
            second,
        )
        self.shortcut = (
            nn.Sequential(_create_conv(in_channels, out_channels, 1, stride), *third)
            if makes_shortcut
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, B, in_channels, H, W] -> [T, B, out_channels, H / stride, W / stride]`, sizes rounded up."""
        return self.CONNECT[self.connect](self.branch(x), self.shortcut(x))

    def extra_repr(self) -> str:
        return f"connect={self.connect!r}"


class MSBlock(nn.Module):
    """A block that computes `A(x) + x`: membrane potentials, not spikes, bypass the branch `A`.

    The branch consists of a neuron, a 3x3 convolution and a batch norm, followed by the same three layers again. If
    `stride` is not 1, or if the number of channels changes, the bypassing `x` passes through a separate 1x1 convolution
    and batch norm. All convolutions of the branch read only spikes.

    Args:
        in_channels, out_channels: channels of `[T, B, C, H, W]`.
        neuron: function that returns a new neuron.
        stride: stride of the first convolution.

    Source: Hu et al., "Advancing spiking neural networks toward deep residual learning", TNNLS 2024 (MS-ResNet).
    """

    def __init__(self, in_channels: int, out_channels: int, neuron: Callable[[], nn.Module], stride: int = 1) -> None:
        super().__init__()
        _check_sizes(in_channels, out_channels, stride)
        first, second = _create_neurons(neuron, 2)
        self.branch = nn.Sequential(
            first,
            _create_conv(in_channels, out_channels, 3, stride),
            second,
            _create_conv(out_channels, out_channels, 3),
        )
        self.shortcut = (
            _create_conv(in_channels, out_channels, 1, stride)
            if stride != 1 or in_channels != out_channels
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, B, in_channels, H, W] -> [T, B, out_channels, H / stride, W / stride]`, sizes rounded up."""
        shortcut: Tensor = self.shortcut(x)
        branch: Tensor = self.branch(x)
        return branch + shortcut


def _check_sizes(in_channels: int, out_channels: int, stride: int) -> None:
    for name, value in {"in_channels": in_channels, "out_channels": out_channels, "stride": stride}.items():
        check_count(name, value)


def _create_neurons(neuron: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """Creates the neurons of a block.

    Raises:
        ParameterError: `neuron` does not return modules, or returns the same instance twice.
    """
    if isinstance(neuron, nn.Module) or not callable(neuron):
        description = f"an instance of {type(neuron).__name__}" if isinstance(neuron, nn.Module) else repr(neuron)
        raise ParameterError(
            f"neuron is {description}; the block needs several neurons: give a function, such as LIF or "
            "lambda: LIF(tau=2.0)."
        )
    neurons = [neuron() for _ in range(count)]
    for module in neurons:
        if not isinstance(module, nn.Module):
            raise ParameterError(f"neuron() returned {module!r}, a {type(module).__name__}; it must return a module.")
    if len(set(map(id, neurons))) < count:
        raise ParameterError(
            "neuron() returned the same instance twice, so that two layers would share one state: return a new "
            "instance in each call, lambda: LIF()."
        )
    return neurons


def _create_conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> OverTime:
    conv = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    return OverTime(conv, nn.BatchNorm2d(out_channels))
