"""Classifies spoken words that are encoded as spikes. tonic reads the files of the Spiking Heidelberg Digits.

    python examples/datasets/audio.py [--recurrent] [--data DIR] [--epochs 20] [--checkpoint DIR] [--out audio.png]

With `--data DIR`, tonic reads the data from DIR, or downloads them to DIR: spoken digits in English and German, 8156
for training and 2264 held out. Without `--data`, the script writes synthetic words to files of the same format, and
reads these files. In each word, three tones rise or fall. The accuracy on these words shows that the pipeline works,
but it is no measure for speech.

`--paper` is for the real files. It uses adaptive recurrent layers with norms, after Bittar and Garner ("A surrogate
gradient spiking baseline for speech command recognition", 2022). They report 94.62% on the Spiking Heidelberg Digits
and 77.4% on the Spiking Speech Commands (`--set ssc`). The following commands have not been run for this repository,
because the files were not available:

    python examples/datasets/audio.py --data DIR --paper --lr 0.01 --batch 128 --epochs 30 --device cuda
    python examples/datasets/audio.py --data DIR --set ssc --paper --lr 0.01 --batch 128 --epochs 30 --device cuda
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from tonic import MemoryCachedDataset
from tonic.datasets import SHD, SSC
from tonic.transforms import Compose, Downsample, ToFrame
from torch import Tensor, nn
from training import draw, fit, parser, positive, report

from flexsn_nn import LI, LIF, RALIF, OverTime, Recurrent
from flexsn_nn.data import pad_sequences, readout
from flexsn_nn.surrogate import ATan

CHANNELS = 140  # the cochlea model has 700
WINDOW = 10_000  # duration of a step in microseconds
WORDS = 20  # ten digits in two languages
COMMANDS = 35  # words of the Spiking Speech Commands


class Network(nn.Module):
    """A network from spike counts `[T, B, 1, 140]` and their lengths `[B]` to scores `[B, 20]`."""

    def __init__(self, backend: str, recurrent: bool = False) -> None:
        super().__init__()

        def neurons() -> nn.Module:
            neuron = LIF(tau=10.0, decay_input=False, surrogate_function=ATan(), backend=backend)
            # The initial weights are small, so that the recurrent spikes are not stronger than the input.
            return Recurrent(neuron, 128, init=partial(nn.init.orthogonal_, gain=0.2)) if recurrent else neuron

        self.layers = nn.Sequential(
            nn.Flatten(2),
            nn.Linear(CHANNELS, 128),
            neurons(),
            nn.Linear(128, 128),
            neurons(),
            nn.Linear(128, WORDS),
            LI(tau=20.0, backend=backend),
        )

    def forward(self, counts: Tensor, lengths: Tensor) -> Tensor:
        return 10 * readout(self.layers(counts), lengths)


class PaperNetwork(nn.Module):
    """Two adaptive recurrent layers with norms and dropout, from `[T, B, 1, 140]` to scores `[B, classes]`."""

    def __init__(self, backend: str, classes: int, width: int = 1024) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten(2)]
        for features in (CHANNELS, width):
            layers += [
                OverTime(nn.Linear(features, width, bias=False), nn.BatchNorm1d(width)),
                RALIF(width, tau=10.0, tau_a=20.0, beta=0.2, backend=backend),
                nn.Dropout(0.1),
            ]
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes), LI(tau=10.0, backend=backend))

    def forward(self, counts: Tensor, lengths: Tensor) -> Tensor:
        return readout(self.layers(counts), lengths)


def frames() -> Compose:
    """Returns a transform from spikes to counts `[T, 1, 140]`, each over five channels and 10 ms.

    T differs from word to word.
    """
    return Compose(
        [
            Downsample(spatial_factor=CHANNELS / 700),
            ToFrame(sensor_size=(CHANNELS, 1, 1), time_window=WINDOW, include_incomplete=True),
        ]
    )


def synthetic_word(word: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted times in seconds and the channels of a word's spikes. Each word has its own three tones."""
    tones = np.random.default_rng(1000 + word)  # all speakers of a word use the same tones
    begin, end = tones.uniform(50, 650, (2, 3))
    seconds = random.uniform(0.4, 0.9)  # the duration of the word
    count = int(1200 * seconds)
    time = np.sort(random.uniform(0, 1, count))
    tone = random.integers(0, 3, count)
    channel = begin[tone] + (end - begin)[tone] * time + random.normal(0, 12, count) + random.normal(0, 20)
    noise = random.random(count) < 0.2
    channel[noise] = random.uniform(0, 700, noise.sum())
    return time * seconds, np.clip(channel, 0, 699)


def write_words(folder: Path, seed: int, counts: tuple[int, int] = (400, 200)) -> None:
    """Writes two HDF5 files and their archives, like the files that tonic stores after a download.

    Args:
        folder: folder to write to.
        seed: seed of the words.
        counts: number of words for training, and number of held-out words.
    """
    random = np.random.default_rng(seed)
    top = folder / "SHD"
    top.mkdir(parents=True)
    for part, count in zip(("train", "test"), counts, strict=True):
        path = top / f"shd_{part}.h5"
        with h5py.File(path, "w") as file:
            times = file.create_dataset("spikes/times", (count,), h5py.vlen_dtype(np.float16))
            units = file.create_dataset("spikes/units", (count,), h5py.vlen_dtype(np.uint16))
            for number in range(count):
                times[number], units[number] = synthetic_word(number % WORDS, random)
            file["labels"] = np.arange(count, dtype=np.uint16) % WORDS
            file["extra/speaker"] = np.zeros(count, dtype=np.uint16)
            file["extra/keys"] = [f"word {word}".encode() for word in range(WORDS)]
        with zipfile.ZipFile(f"{path}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(path, path.name)


def main(arguments: list[str]) -> int:
    description = "Trains a spiking network on spoken words."
    options = parser("audio", description, "tonic.datasets.SHD", 20, 32)
    options.add_argument("--recurrent", action="store_true", help="use two recurrent layers")
    options.add_argument("--paper", action="store_true", help="use the network of Bittar and Garner")
    options.add_argument("--width", type=positive, default=1024, help="neurons per layer for --paper")
    options.add_argument("--set", choices=["shd", "ssc"], default="shd", help="the data set in DIR")
    settings = options.parse_args(arguments)
    if settings.data is None and settings.set == "ssc":
        options.error("--set ssc needs --data DIR: synthetic words only exist in the format of the digits")
    torch.manual_seed(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        if settings.data is None:
            torch.set_num_threads(1)  # the layers are small, so threads would wait for each other
            write_words(Path(folder), settings.seed)
            print("no --data: synthetic words in the format of the Spiking Heidelberg Digits, not speech")
        root = str(settings.data or folder)
        # The spikes are read and counted once, and the counts stay in memory.
        training, held_out = (
            MemoryCachedDataset(
                SHD(root, train=split == "train", transform=frames())
                if settings.set == "shd"
                else SSC(root, split=split, transform=frames())
            )
            for split in ("train", "test")
        )
        print(f"{len(training)} words to train on, {len(held_out)} held out")
        network: nn.Module = Network(settings.backend, settings.recurrent)
        if settings.paper:
            network = PaperNetwork(settings.backend, WORDS if settings.set == "shd" else COMMANDS, settings.width)
        network.to(settings.device)
        history = fit(network, training, held_out, settings, pad_sequences)
        draw(network, history, pad_sequences([held_out[number] for number in range(32)]), settings)
    report(history, f"{WINDOW // 1000} ms a step", settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
