"""Step functions in which the neurons of a row inhibit each other, as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from recurrent_cores import Cell, Matrix
from torch import Tensor


class WithoutMatrix(Cell):
    """Base of cores without a matrix."""

    def build(self, size: int, matrix: Matrix) -> None:
        pass


class Lateral(WithoutMatrix):
    """A core in which the mean of a row inhibits each neuron of this row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        return self.lif(x - s.mean(-1, keepdim=True), s, h - h.mean(-1, keepdim=True) / 2)


class Winner(WithoutMatrix):
    """A core in which only the neurons with the largest value of their row can spike. If several neurons have this
    value, all of them can spike. The maximum has a gradient.
    """

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        largest = h.amax(-1, keepdim=True)
        s = self.spike(h - 0.5) * (h >= largest)
        return s, s, h * (1 - s) - largest / 8


class Least(WithoutMatrix):
    """A core that uses the minimum and the maximum over each row. Both come from one `aminmax` of a sum."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v / 2 + x
        low, high = h.aminmax(dim=-1, keepdim=True)
        return self.lif(x - low / 4, s, h - high / 4)


class First(WithoutMatrix):
    """A core in which only one neuron of each row can spike: the first neuron with the largest value. This value
    inhibits all neurons of the row except the smallest one.
    """

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        largest, winner = h.max(-1, keepdim=True)
        is_winner = F.one_hot(winner.squeeze(-1), h.shape[-1]).to(h.dtype)
        s = self.spike(h - 0.5) * is_winner
        low, index = torch.min(h, dim=-1)
        least = torch.arange(h.shape[-1], device=h.device) == h.argmin(-1, keepdim=True)
        return s, s, torch.where(least, h / 2, h * (1 - s) - largest / 8) + (low * (index > 2)).unsqueeze(-1) / 16


class Soft(WithoutMatrix):
    """A core that multiplies its input by a softmax over the neurons of a row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        return self.lif(x * torch.softmax(h, -1), s, h)


class Normed(Cell):
    """A core with a matrix and a layer norm, whose weight and bias are learned."""

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.weight, self.bias = self.extra(size), self.extra(size, value=-0.125)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        current = F.layer_norm(x + F.linear(s, self.v), (self.size,), self.weight, self.bias)
        return self.lif(current, s, v)


class Divided(Cell):
    """A core that reduces without `keepdim`. It computes with one value per row before it expands this value."""

    def build(self, size: int, matrix: Matrix) -> None:
        self.strength = self.extra()

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        total = (h * h).sum(-1)
        share = torch.exp(-total) * self.strength + 1
        return self.lif(x / share.unsqueeze(-1), s, h - total[..., None] / 16)


class ExciteInhibit(Cell):
    """Excitatory neurons and a smaller number of inhibitory neurons, which are inhibited by their own mean."""

    def build(self, size: int, matrix: Matrix) -> None:
        num_inhibitory = size // 3
        self.to_inhibitory, self.back = (
            torch.nn.Parameter(matrix(*s)) for s in ((num_inhibitory, size), (size, num_inhibitory))
        )

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        drive = F.linear(s, self.to_inhibitory)
        inhibition = torch.relu(drive - drive.mean(-1, keepdim=True))
        return self.lif(x - F.linear(inhibition, self.back), s, v)


class Deviating(WithoutMatrix):
    """A core that uses a standard deviation, a norm and a `logsumexp` over the neurons of a row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2
        spread = torch.std(x - h, -1, keepdim=True) + torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        return self.lif(x / (1 + spread), s, h - torch.logsumexp(h, -1, keepdim=True) / 8)


class Ahead(WithoutMatrix):
    """A core with a mean of only the input, a sum of only a state, and a mean that no later step needs."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s, _, v = self.lif(x - x.mean(-1, keepdim=True), s, v - v.sum(-1, keepdim=True) / 16)
        return s - (s * v).mean(-1, keepdim=True), s, v


CELLS = (Lateral, Winner, First, Least, Soft, Normed, Divided, ExciteInhibit, Deviating, Ahead)
