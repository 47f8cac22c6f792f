"""Step functions that this package's tests share, with the arguments of their calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spike = Callable[[torch.Tensor], torch.Tensor]
Core = Callable[..., tuple[torch.Tensor, ...]]


class SigmoidSpike(torch.autograd.Function):
    """Computes ``x >= 0``, with the derivative of ``sigmoid(4 x)`` as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(4 * x)
        return grad_outputs[0] * 4 * soft * (1 - soft)


def function_spike(x: torch.Tensor) -> torch.Tensor:
    spikes: torch.Tensor = SigmoidSpike.apply(x)
    return spikes


def detach_spike(x: torch.Tensor) -> torch.Tensor:
    hard = (x >= 0).to(x)
    soft = torch.sigmoid(4 * x)
    # The result is exactly 0 or 1, because soft - soft.detach() is exactly 0.
    return hard.detach() + (soft - soft.detach())


def smooth_spike(x: torch.Tensor) -> torch.Tensor:
    """Computes a spike without a threshold, so that gradcheck can check it."""
    return torch.sigmoid(4 * x)


SPIKES: dict[str, Spike] = {"function": function_spike, "detach": detach_spike}


def if_core(spike: Spike) -> Core:
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + x
        s = spike(h - 1.0)
        return s, h - s

    return core


def lif_core(spike: Spike, *, hard_reset: bool, detach_reset: bool) -> Core:
    def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + (x - v) / 2.0
        s = spike(h - 1.0)
        reset = s.detach() if detach_reset else s
        return s, (h * (1 - reset) if hard_reset else h - reset)

    return core


def plif_core(spike: Spike) -> Core:
    def core(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + (x - v) * torch.sigmoid(w)
        s = spike(h - 1.0)
        return s, h * (1 - s)

    return core


def alif_core(spike: Spike) -> Core:
    rho = math.exp(-1 / 5)

    def core(x: torch.Tensor, v: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + (x - v) / 2.0
        threshold = 0.5 + 1.8 * a
        s = spike(h - threshold)
        return s, h - s * threshold, rho * a + s

    return core


def izhikevich_core(spike: Spike) -> Core:
    def core(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
        s = spike(h - 1.0)
        charged = w + (0.2 * (h + 0.1) - w) / 2.0
        return s, s * -0.1 + (1 - s) * h, charged + 0.3 * s

    return core


def two_by_two_core(spike: Spike) -> Core:
    def core(x: torch.Tensor, gate: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new_i = 0.5 * i + x
        h = 0.75 * v + new_i * torch.tanh(gate)
        s = spike(h - 0.5)
        return s, h, new_i, h - s

    return core


@dataclass(frozen=True, slots=True)
class Case:
    """A core, the counts of its inputs, states and outputs, and the shapes of its lifted tensors (``lifted``)."""

    name: str
    make: Callable[[Spike], Core]
    num_inputs: int
    num_states: int
    num_outputs: int
    lifted: Sequence[tuple[int, ...]] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_inputs, self.num_states, self.num_outputs

    def arguments(
        self,
        steps: int,
        step_shape: tuple[int, ...] = (2, 3),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        requires_grad: bool = True,
    ) -> list[torch.Tensor]:
        """Returns the flat arguments ``[*input_seqs, *init_states, *lifted]``."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            tensor = torch.randn(shape, generator=generator, dtype=dtype)
            return tensor.requires_grad_(requires_grad)

        return [
            *(draw(steps, *step_shape) for _ in range(self.num_inputs)),
            *(draw(*step_shape) for _ in range(self.num_states)),
            *(draw(*shape) for shape in self.lifted),
        ]


def _lif(*, hard_reset: bool, detach_reset: bool) -> Callable[[Spike], Core]:
    return lambda spike: lif_core(spike, hard_reset=hard_reset, detach_reset=detach_reset)


CASES = [
    Case("if", if_core, 1, 1, 1),
    Case("lif_hard", _lif(hard_reset=True, detach_reset=False), 1, 1, 1),
    Case("lif_hard_detached", _lif(hard_reset=True, detach_reset=True), 1, 1, 1),
    Case("lif_soft", _lif(hard_reset=False, detach_reset=False), 1, 1, 1),
    Case("lif_soft_detached", _lif(hard_reset=False, detach_reset=True), 1, 1, 1),
    Case("plif", plif_core, 1, 1, 1, lifted=[(3,)]),
    Case("alif", alif_core, 1, 2, 1),
    Case("izhikevich", izhikevich_core, 1, 2, 1),
    Case("two_by_two", two_by_two_core, 2, 2, 2),
]


def value_and_gradients(
    run: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.Tensor], seed: int = 1
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the results of ``run(*arguments)``, and the gradients of a sum of all results with random weights."""
    leaves = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments]
    results = list(run(*leaves))
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for result in results:
        weight = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        loss = loss + (result.double() * weight).sum()
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(loss, differentiated, materialize_grads=True)
    return [result.detach() for result in results], list(gradients)
