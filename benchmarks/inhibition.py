"""Steps in which the neurons of a row inhibit each other: times of training steps in compiled kernels and in the loop.

    python benchmarks/inhibition.py [--output FILE] [--seconds 55] [--shapes TxBxN ...] [--only NAME ...]

A training step is a forward, and a backward that computes the gradients of the input and the matrices from a random
gradient, in float32 and in eager mode. The loop and the kernels alternate three times, and a figure is the median.
Without a GPU, the kernels are in C++.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from against_loop import main
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.surrogate import ATan

Results = tuple[Tensor, Tensor, Tensor]


class Inhibited(nn.Module):
    """Base class of the step functions. `lif` is one step of a LIF neuron."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.spike = ATan()

    def lif(self, current: Tensor, v: Tensor) -> Results:
        h = v + (current - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


class Lateral(Inhibited):
    """A LIF neuron inhibited by the mean of the previous spikes of its row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(x - s.mean(-1, keepdim=True), v)


class Winner(Inhibited):
    """A row of neurons in which only the neuron with the largest potential spikes."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        h = v + (x - s - v) / 2
        s = self.spike(h - 1) * (h >= h.amax(-1, keepdim=True))
        return s, s, h * (1 - s)


class Soft(Inhibited):
    """A LIF neuron whose input is scaled by a softmax over the potentials of its row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(x * torch.softmax(v, -1) * x.shape[-1], v)


class Normed(Inhibited):
    """A LIF neuron whose current, with its previous spike and potential, is normalised by a layer norm."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(F.layer_norm(x - s + v, x.shape[-1:]), v)


class ExciteInhibit(Inhibited):
    """A LIF neuron inhibited by `features // 4` inhibitory neurons, which also inhibit each other."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        num_inhibitory = features // 4
        self.to_inhibitory = nn.Parameter(torch.randn(num_inhibitory, features) / features**0.5)
        self.back = nn.Parameter(torch.rand(features, num_inhibitory) / num_inhibitory)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        drive = F.linear(s, self.to_inhibitory)
        inhibition = torch.relu(drive - drive.mean(-1, keepdim=True))
        return self.lif(x - F.linear(inhibition, self.back), v)


CORES: tuple[type[Inhibited], ...] = (Lateral, Winner, Soft, Normed, ExciteInhibit)


if __name__ == "__main__":
    main("inhibition", "Inhibition within a step", CORES, lambda core, backend: FlexSN(core, 1, 2, 1, backend=backend))
