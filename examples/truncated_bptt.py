"""Trains along a sequence in chunks, so that the memory does not depend on the length of the sequence.

    python examples/truncated_bptt.py [--backend auto] [--device cpu] [--steps 1024] [--chunk 64] [--passes 10]

A spiking network predicts a signal `--ahead` steps in advance. The neurons keep their state from chunk to chunk.
`detach_net` cuts the graph between chunks, so that the backward of a chunk ends at the beginning of this chunk
(truncated backpropagation through time). The example also measures the memory that the forward saves for the backward.
It compares the gradient inside the last chunk with the gradient from a backward through the whole sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss

from flexsn_nn import LI, PLIF, functional

HIDDEN = 64
BATCH = 8


def network(backend: str, device: torch.device) -> nn.Module:
    """Returns a network from `[T, B, 1]` to `[T, B, 1]`."""
    inward = nn.Linear(1, HIDDEN)
    nn.init.normal_(inward.weight, std=2.0)
    return nn.Sequential(
        inward,
        PLIF(init_tau=2.0 + 6.0 * torch.rand(HIDDEN), detach_reset=True, backend=backend),
        nn.Linear(HIDDEN, 1),
        LI(tau=2.0, backend=backend),
    ).to(device)


def signal(steps: int, device: torch.device) -> Tensor:
    """Returns two sines with random periods and phases, `[T, B, 1]`."""
    time = torch.arange(steps, device=device).view(-1, 1, 1)
    periods = torch.tensor([3.0, 7.0], device=device) * (1.0 + 0.2 * torch.rand(BATCH, 2, device=device))
    waves = torch.sin(time / periods + 6.3 * torch.rand(BATCH, 2, device=device))
    return waves[..., :1] + 0.5 * waves[..., 1:]


class KeptBytes:
    """Context that counts the bytes that autograd saves for the backward."""

    def __enter__(self) -> KeptBytes:
        self._saved: dict[tuple[int, int], Tensor] = {}  # keeps the tensors alive, so that no address is used twice
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self.bytes = sum(tensor.nbytes for tensor in self._saved.values())
        self._saved.clear()

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved[tensor.data_ptr(), tensor.nbytes] = tensor.detach()
        return tensor


def chunks(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(size), y.split(size), strict=True)


def train(net: nn.Module, x: Tensor, y: Tensor, chunk: int, passes: int) -> tuple[list[float], int]:
    """Trains the network.

    Returns the mean loss of each pass over the sequence, and the largest number of bytes that one chunk saves.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses, largest = [], 0
    for _ in range(passes):
        functional.reset_net(net)  # a new sequence begins
        total = 0.0
        for part, target in chunks(x, y, chunk):
            with KeptBytes() as counter:
                loss = mse_loss(net(part), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            functional.detach_net(net)  # keeps the state, and cuts the graph
            total += float(loss.detach()) * len(part) / len(x)
            largest = max(largest, counter.bytes)
        losses.append(total)
    return losses, largest


def kept_by_all(net: nn.Module, x: Tensor, y: Tensor) -> int:
    """Returns the number of bytes that autograd saves if the whole sequence is one chunk."""
    functional.reset_net(net)
    with KeptBytes() as counter:
        mse_loss(net(x), y)
    functional.reset_net(net)
    return counter.bytes


def gradient_of_last(net: nn.Module, x: Tensor, y: Tensor, chunk: int, truncated: bool) -> Tensor:
    """Returns the gradient of the last chunk's loss with respect to the last chunk of `x`."""
    functional.reset_net(net)
    before, last = x[:-chunk], x[-chunk:].clone().requires_grad_()
    net(before)
    if truncated:
        functional.detach_net(net)
    loss = mse_loss(net(last), y[-chunk:])
    (gradient,) = torch.autograd.grad(loss, [last])
    functional.reset_net(net)
    return gradient


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="truncated_bptt", description="Trains along a sequence in chunks.")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--steps", type=int, default=1024, help="length of the sequence")
    parser.add_argument("--chunk", type=int, default=64, help="steps per chunk")
    parser.add_argument("--ahead", type=int, default=4, help="number of steps to predict ahead")
    parser.add_argument("--passes", type=int, default=10, help="passes over the sequence")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    torch.manual_seed(settings.seed)
    net = network(settings.backend, settings.device)
    sequence = signal(settings.steps + settings.ahead, settings.device)
    x, y = sequence[: settings.steps], sequence[settings.ahead :]
    losses, largest_chunk_bytes = train(net, x, y, settings.chunk, settings.passes)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {settings.passes} passes over {settings.steps} steps")
    whole_bytes = kept_by_all(net, x, y)
    print(
        f"saved for the backward pass: {largest_chunk_bytes / 1e6:.2f} MB per chunk, "
        f"{whole_bytes / 1e6:.2f} MB for all steps"
    )
    truncated_gradient, full_gradient = (
        gradient_of_last(net, x, y, settings.chunk, truncated) for truncated in (True, False)
    )
    difference = float((truncated_gradient - full_gradient).abs().max())
    print(f"the gradient inside the last chunk differs by {difference:.1e} from the whole sequence's gradient")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
