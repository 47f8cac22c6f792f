"""Cores with convolutions: kernels and a library's convolutions step by step, against the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recurrent_cores import _Soft, _Spike
from torch import Tensor, nn

from flexsn_graph import NonPointwiseError
from flexsn_hop import eager_scan, eager_scan_final_state
from flexsn_nn import FlexSN
from flexsn_runtime import RecurrentSpecialization, ScanProgram, TargetName, prepare, scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGETS: tuple[TargetName, ...] = ("triton",) if DEVICE.type == "cuda" else ("triton", "cpp")
Results = tuple[list[Tensor], list[Tensor | None]]


class Core(nn.Module):
    """A core whose state is convolved.

    Args:
        channels: of the step.
        make: makes a convolution.
        soft: a smooth function instead of the spikes.
    """

    num_states = 2

    def __init__(self, channels: int, make: Callable[..., nn.Module] = nn.Conv2d, *, soft: bool = False) -> None:
        super().__init__()
        self.spike: Callable[[Tensor], Tensor] = _Soft.apply if soft else _Spike.apply
        self.build(channels, make)

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        self.conv = make(channels, channels, 3, padding=1)


class Spiking(Core):
    """A recurrent LIF, whose spikes come back through a convolution."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + self.conv(s) - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


class ConvLSTM(Core):
    """Gates of one convolution."""

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        self.conv = make(channels, 4 * channels, 3, padding=1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (torch.cat([x, x, x, x], 1) + self.conv(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c


class OfInputToo(Core):
    """A convolution of inputs and states side by side."""

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        self.conv = make(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        v = 0.5 * v + self.conv(torch.cat([x, s], 1))
        s = self.spike(v - 1)
        return s, s, v - s


class Twice(Core):
    """Two convolutions, one after the other, and a weight that is used twice."""

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        self.conv, self.point = make(channels, channels, 3, padding=1), make(channels, channels, 1)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        v = 0.5 * v + x + self.point(torch.tanh(self.conv(s))) + self.point(v)
        s = self.spike(v - 1)
        return s, s, v - s


class Masked(Core):
    """A weight that is masked in the step."""

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        super().build(channels, make)
        self.mask: Tensor
        self.register_buffer("mask", (torch.arange(self.conv.weight.numel()) % 3 > 0).view_as(self.conv.weight))

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        v = 0.5 * v + x + F.conv2d(s, self.conv.weight * self.mask, padding=1)
        s = self.spike(v - 1)
        return s, s, v - s


class Outside(Core):
    """Convolutions of inputs and for a readout alone: neither is in the loop over time."""

    def build(self, channels: int, make: Callable[..., nn.Module]) -> None:
        self.first, self.last = make(channels, channels, 3, padding=1), make(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        v = 0.5 * v + self.first(x)
        s = self.spike(v - 1)
        return self.last(s), s, v - s


CORES = (Spiking, ConvLSTM, OfInputToo, Twice, Masked, Outside)


def sequences(core: Core, num_steps: int, *step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(num_steps, *step), *[step] * core.num_states]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def run(core: Core, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool = True) -> list[Tensor]:
    """By the loop, or by kernels and convolutions."""
    if target is None:
        loop = eager_scan if state_seqs else eager_scan_final_state
        return list(loop(core, 1, core.num_states, 1, *tensors))
    step, arguments = prepare(ScanProgram(core, 1, core.num_states, 1, on_cpu=target), tensors)
    assert isinstance(step, RecurrentSpecialization)
    return list(scan(step, arguments, state_seqs=state_seqs))


def differentiated(core: Core, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool) -> Results:
    results = run(core, tensors, target, state_seqs=state_seqs)
    loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for i, result in enumerate(results):
        weights = (torch.arange(result.numel(), device=DEVICE) % (5 + i) - 2).reshape(result.shape) / 4
        loss = loss + (result * weights).double().sum()
    wanted = [*tensors, *core.parameters()]
    return results, list(torch.autograd.grad(loss, wanted, allow_unused=True))


def check(core: Core, tensors: Sequence[Tensor], target: TargetName, *, state_seqs: bool = False) -> None:
    expected, wanted = differentiated(core, tensors, None, state_seqs=state_seqs)
    got, gradients = differentiated(core, tensors, target, state_seqs=state_seqs)
    half = tensors[0].dtype in (torch.bfloat16, torch.float16)
    near: dict[str, Any] = {"rtol": 2e-2, "atol": 5e-2} if half else {"rtol": 1e-4, "atol": 1e-4}
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **near)
    for a, b in zip(gradients, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            scale = b.abs().max().clamp(min=1)
            torch.testing.assert_close(a / scale, b / scale, **near)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_it_is_the_loop(core: type[Core], target: TargetName) -> None:
    torch.manual_seed(0)
    made = core(3).to(DEVICE)
    check(made, sequences(made, 4, 2, 3, 7, 5), target)
