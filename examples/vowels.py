"""Recognises speakers of Japanese vowels, with learned delays, from recordings of different lengths and from streams.

    pip install aeon
    python examples/vowels.py [--data vowels] [--backend auto] [--device cpu] [--epochs 40] [--seed 0]

JapaneseVowels is a data set in the package `aeon`. Nine speakers say /ae/. A recording has 7 to 29 steps, and 12
cepstral coefficients per step. There are 270 recordings for training and 370 for the test. `--data made` uses synthetic
recordings, and needs no package. These recordings contain pulses in four channels. The class is the order of the
pulses, and the pause between them.

    x -> Linear -> Delay (one for each neuron, learned) -> LIF -> Linear -> Recurrent LIF (learned delays) -> Linear

In training, recordings are padded to a batch with `lengths`. Neurons stop at the end of each recording, and the scores
are means over the steps of the recording. In the test, the recordings follow each other in eight streams, without
padding. `resets` begins each recording with the initial states. Silent steps separate the recordings. The number of
these steps is the longest delay. The scores equal those of padded recordings. `fuse_delays` moves the first delays into
the kernels of the neurons after them, if these kernels support delays.

A published result on the same split is 94.9%, with time warping and the nearest neighbour (Bagnall et al., "The UEA
multivariate time series classification archive", 2018).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from flexsn_nn import LIF, Recurrent, functional, surrogate
from flexsn_nn.data import pad_sequences, readout
from flexsn_nn.fusion import fuse_delays
from flexsn_nn.layer import Delay

HIDDEN = 96
MOST = 6  # steps of the longest delay
STREAMS = 8
BATCH = 30
Recordings = list[tuple[Tensor, int]]


class Task(NamedTuple):
    """Recordings `[T_i, channels]` with their classes."""

    train: Recordings
    test: Recordings
    classes: int


class Result(NamedTuple):
    """Results of a training run.

    Attributes:
        losses: mean loss of each epoch.
        accuracy: accuracy on streams.
        difference: largest difference between a score on streams and the same score of the padded recordings.
        moved: mean change of the delays, in steps.
    """

    losses: list[float]
    accuracy: float
    difference: float
    moved: float


class Network(nn.Module):
    """A network from recordings `[T, B, channels]` to scores `[T, B, classes]`."""

    def __init__(self, channels: int, classes: int, backend: str) -> None:
        super().__init__()
        spike = surrogate.ATan()
        self.inward = nn.Linear(channels, HIDDEN, bias=False)  # without a bias, silent steps stay silent
        self.late = Delay(MOST / 2 * torch.rand(HIDDEN), max_delay=MOST, learn=True)
        self.first = LIF(tau=3.0, surrogate_function=spike, backend=backend)
        self.between = nn.Linear(HIDDEN, HIDDEN)
        past = Delay(MOST * torch.rand(HIDDEN), max_delay=MOST, learn=True, interpolation="triangle", width=2.0)
        self.second = Recurrent(LIF(tau=3.0, surrogate_function=spike, backend=backend), HIDDEN, delay=past)
        self.outward = nn.Linear(HIDDEN, classes)
        nn.init.normal_(self.inward.weight, std=1.5 / channels**0.5)
        fuse_delays(self)

    def forward(self, x: Tensor, lengths: Tensor | None = None, resets: Tensor | None = None) -> Tensor:
        functional.reset_net(self)
        spikes = self.first(self.late(self.inward(x)), lengths=lengths, resets=resets)
        spikes = self.second(self.between(spikes), lengths=lengths, resets=resets)
        scores: Tensor = self.outward(spikes)
        return scores


def vowels() -> Task:
    """Returns JapaneseVowels. Each coefficient is normalised by its mean and deviation in the training recordings."""
    try:
        from aeon.datasets import load_japanese_vowels
    except ImportError as error:
        raise SystemExit(f"The recordings are in the package aeon: pip install aeon. Or --data made. {error}") from None

    splits = {split: load_japanese_vowels(split=split) for split in ("train", "test")}
    names = sorted({str(label) for label in splits["train"][1]})
    all_steps = torch.cat([torch.as_tensor(series).float() for series in splits["train"][0]], 1)
    center, spread = all_steps.mean(1), all_steps.std(1)

    def recordings(split: str) -> Recordings:
        series, labels = splits[split]
        rows = [(torch.as_tensor(coefficients).float().T - center) / spread for coefficients in series]
        return [(row, names.index(str(label))) for row, label in zip(rows, labels, strict=True)]

    return Task(recordings("train"), recordings("test"), len(names))


def made(count: int = 96, channels: int = 4) -> Task:
    """Returns synthetic recordings of four classes: pulses in ascending or descending channels, 1 or 2 steps apart."""

    def recording() -> tuple[Tensor, int]:
        label = int(torch.randint(4, ()))
        x = 0.2 * torch.randn(int(torch.randint(14, 26, ())), channels)
        begin, pause = int(torch.randint(4, ())), 1 + label // 2
        for i in range(channels):
            x[begin + pause * i, i if label % 2 else channels - 1 - i] += 3
        return x, label

    return Task([recording() for _ in range(count)], [recording() for _ in range(count // 2)], 4)


def stream(recordings: Recordings) -> tuple[Tensor, Tensor, Tensor]:
    """Joins the recordings, one after another, in `STREAMS` rows of similar lengths.

    Returns:
        Steps `[T, STREAMS, channels]`; booleans `[T, STREAMS]`, which are True where a recording begins; and for each
        step, the index of its recording `[T, STREAMS]`, or -1 between recordings.
    """
    rows: list[list[int]] = [[] for _ in range(STREAMS)]
    ends = [0] * STREAMS
    for i in sorted(range(len(recordings)), key=lambda i: -len(recordings[i][0])):
        row = min(range(STREAMS), key=lambda row: ends[row])
        rows[row].append(i)
        ends[row] += len(recordings[i][0]) + MOST
    shape = max(ends), STREAMS
    x, resets = torch.zeros(*shape, recordings[0][0].shape[1]), torch.zeros(shape, dtype=torch.bool)
    owner = torch.full(shape, -1)
    for row, members in enumerate(rows):
        t = 0
        for i in members:
            steps = len(recordings[i][0])
            x[t : t + steps, row], owner[t : t + steps, row], resets[t, row] = recordings[i][0], i, True
            t += steps + MOST  # leaves space for the last delayed value of this recording
    return x, resets, owner


def streamed(net: Network, recordings: Recordings, device: torch.device) -> Tensor:
    """Returns scores `[recordings, classes]` from streams. A score is the mean over the steps of a recording."""
    x, resets, owner = stream(recordings)
    with torch.no_grad():
        scores = net(x.to(device), resets=resets.to(device)).cpu()
    inside = owner >= 0
    total = torch.zeros(len(recordings), scores.shape[-1]).index_add(0, owner[inside], scores[inside])
    return total / torch.tensor([len(recording) for recording, _ in recordings]).unsqueeze(1)


def padded(net: Network, recordings: Recordings, device: torch.device) -> Tensor:
    """Returns the scores `[recordings, classes]` of all recordings in one padded batch."""
    x, lengths, _ = pad_sequences(recordings)
    return readout(net(x.to(device), lengths), lengths)


def train(task: Task, epochs: int, seed: int = 0, device: str | torch.device = "cpu", backend: str = "auto") -> Result:
    """Trains the network, and tests it on streams."""
    torch.manual_seed(seed)
    device = torch.device(device)
    net = Network(task.train[0][0].shape[1], task.classes, backend).to(device)
    delays = [parameter for name, parameter in net.named_parameters() if name.endswith("delay")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("delay")]
    before = [delay.detach().clone() for delay in delays]
    groups: list[dict[str, Any]] = [{"params": delays, "lr": 3e-2}, {"params": others}]
    optimizer = torch.optim.Adam(groups, lr=3e-3)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(task.train)).tolist()
        total = 0.0
        for begin in range(0, len(order), BATCH):
            batch = [task.train[i] for i in order[begin : begin + BATCH]]
            labels = torch.tensor([label for _, label in batch], device=device)
            optimizer.zero_grad()
            loss = cross_entropy(padded(net, batch, device), labels)
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for delay in delays:
                    delay.clamp_(0, MOST)
            total += float(loss.detach()) * len(batch)
        losses.append(total / len(order))
    net.eval()
    scores = streamed(net, task.test, device)
    with torch.no_grad():
        difference = float((scores - padded(net, task.test, device).cpu()).abs().max())
    labels = torch.tensor([label for _, label in task.test])
    moved = float(torch.cat([(a.detach() - b).abs() for a, b in zip(delays, before, strict=True)]).mean())
    return Result(losses, float((scores.argmax(1) == labels).float().mean()), difference, moved)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["vowels", "made"], default="vowels")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    task = vowels() if options.data == "vowels" else made()
    result = train(task, options.epochs, options.seed, options.device, options.backend)
    print(
        f"{options.data}: loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}, accuracy {result.accuracy:.1%} of "
        f"{len(task.test)} recordings in {STREAMS} streams; scores differ from those of padded recordings by "
        f"{result.difference:.0e}; mean change of the delays: {result.moved:.2f} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
