"""Neurons of the benchmarks of scans, and their calls on random data of a given size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from step_functions import SigmoidSpike, lif
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.neuron import ALIF, IF, Izhikevich, ParametricLIF

CHANNELS = 128


class TwoInTwoOut(nn.Module):
    """A step function with two inputs, two states and two outputs, and with a learned gain per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor, y: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        current = 0.5 * i + x * self.gain
        h = 0.75 * v + current - torch.tanh(y)
        spike: Tensor = SigmoidSpike.apply(h - 0.5)
        return spike, h, current, h - 0.5 * spike


@dataclass(frozen=True)
class Model:
    """A neuron, and the number of its input sequences and of its output sequences."""

    make: Callable[[], FlexSN]
    num_inputs: int = 1
    num_outputs: int = 1

    @property
    def inference_streams(self) -> int:
        """Number of streams of inference, which reads the inputs and writes the outputs."""
        return self.num_inputs + self.num_outputs

    @property
    def training_streams(self) -> int:
        """Number of streams of training, which also reads the gradients of the outputs, reads the inputs a second time,
        and writes the gradients of the inputs.
        """
        return self.inference_streams + self.num_outputs + 2 * self.num_inputs


MODELS: dict[str, Model] = {
    "LIF": Model(lambda: FlexSN(lif, 1, 1, 1)),
    "IF": Model(IF),
    "PLIF per channel": Model(lambda: ParametricLIF(init_tau=torch.full((CHANNELS,), 2.0))),
    "ALIF": Model(ALIF),
    "Izhikevich": Model(lambda: Izhikevich(a=0.2, b=0.3)),
    "two in, two out": Model(lambda: FlexSN(TwoInTwoOut(), 2, 2, 2), 2, 2),
}


class Work:
    """A neuron with random data `[T, NCL / CHANNELS, CHANNELS]`. Its methods are the calls that are timed."""

    def __init__(
        self, model: Model, steps: int, ncl: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (steps, ncl // CHANNELS, CHANNELS)
        torch.manual_seed(0)

        def random(shift: float) -> Tensor:
            return (torch.randn(shape, device=device) + shift).to(dtype)

        self.neuron = model.make().to(device)
        self.neuron.backend = "triton"
        self.inputs = [random(0.5).requires_grad_() for _ in range(model.num_inputs)]
        self._grads = [random(0.0) for _ in range(model.num_outputs)]
        self._leaves = [*self.inputs, *self.neuron.parameters()]

    @torch.no_grad()
    def infer(self) -> object:
        """Runs one forward without gradients, from a reset state."""
        return self.forward()

    def train(self) -> tuple[Tensor, ...]:
        """Runs one forward and one backward from a reset state, and returns the gradients of inputs and parameters."""
        return torch.autograd.grad(self.forward(), self._leaves, self._grads)

    def forward(self) -> Sequence[Tensor]:
        """Resets the state, runs one forward, and returns the outputs."""
        self.neuron.reset()
        outputs = self.neuron(*self.inputs)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)
