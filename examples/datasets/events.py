"""Classifies recordings of an event camera. tonic reads the files of the DVS128 gesture data set.

    python examples/datasets/events.py [--data DIR] [--epochs 20] [--checkpoint DIR] [--out events.png]

With `--data DIR`, tonic reads the recordings from DIR, or downloads them to DIR: 1077 gestures for training and 264
held out. Without `--data`, the script writes synthetic recordings to files of the same format, and reads these files.
In each recording, a blob moves over the sensor in one of eleven ways. The accuracy on these recordings shows that the
pipeline works, but it is no measure for gestures.

`--paper` is for the real recordings. It uses 20 frames at the resolution of the sensor, and five convolutions with
learned time constants, after Fang et al. ("Incorporating learnable membrane time constant", 2021). They report 97.57%.
The following command has not been run for this repository, because the files were not available:

    python examples/datasets/events.py --data DIR --paper --lr 0.001 --batch 16 --epochs 200 --device cuda
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from tonic import MemoryCachedDataset
from tonic.datasets import DVSGesture
from tonic.transforms import Compose, Downsample, ToFrame
from torch import Tensor, nn
from training import draw, fit, parser, positive, report

from flexsn_nn import LI, LIF, PLIF, OverTime
from flexsn_nn.data import pad_sequences, readout
from flexsn_nn.layer import SharedDropout
from flexsn_nn.surrogate import ATan

SIDE = 32  # side length of a frame in pixels; the sensor has 128 x 128 pixels
WINDOW = 100_000  # duration of a frame in microseconds
CLASSES = len(DVSGesture.classes)


class Network(nn.Module):
    """A network from frames `[T, B, 2, 32, 32]` and their lengths `[B]` to scores `[B, 11]`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            # These norms compute statistics of each single frame, because batch statistics would include the padding.
            OverTime(nn.Conv2d(2, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16)),
            LIF(surrogate_function=ATan(), backend=backend),
            OverTime(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)),
            LIF(surrogate_function=ATan(), backend=backend),
            nn.Flatten(2),
            nn.Linear(32 * 8 * 8, CLASSES),
            LI(tau=4.0, backend=backend),
        )

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        # A pixel may have many events. The logarithm of their number is in a suitable range for the current of neurons.
        return readout(self.layers(frames.log1p()), lengths)


class PaperNetwork(nn.Module):
    """A network from frames `[20, B, 2, 128, 128]` to scores `[B, 11]`, the means of ten votes per class."""

    def __init__(self, backend: str, width: int = 128) -> None:
        super().__init__()

        def plif() -> PLIF:
            return PLIF(init_tau=2.0, detach_reset=True, surrogate_function=ATan(), backend=backend)

        layers: list[nn.Module] = []
        for channels in (2, *[width] * 4):
            conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers += [OverTime(conv, nn.BatchNorm2d(width)), plif(), OverTime(nn.MaxPool2d(2))]
        self.layers = nn.Sequential(
            *layers,
            nn.Flatten(2),
            SharedDropout(0.5),
            nn.Linear(width * 4 * 4, 4 * width),
            plif(),
            SharedDropout(0.5),
            nn.Linear(4 * width, 10 * CLASSES),
            plif(),
        )

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        votes = self.layers(frames).unflatten(2, (CLASSES, 10)).mean(3)
        return 10 * readout(votes, lengths)


def frames_of_paper() -> ToFrame:
    """Returns a transform from events to 20 frames `[20, 2, 128, 128]` with equal numbers of events."""
    return ToFrame(sensor_size=DVSGesture.sensor_size, n_event_bins=20)


def frames() -> Compose:
    """Returns a transform from events to frames `[T, 2, 32, 32]` of event counts.

    T differs from recording to recording.
    """
    return Compose(
        [
            Downsample(spatial_factor=SIDE / 128),
            ToFrame(sensor_size=(SIDE, SIDE, 2), time_window=WINDOW, include_incomplete=True),
        ]
    )


def moving_blob(gesture: int, random: np.random.Generator) -> np.ndarray:
    """Returns events `[N, 4]`, sorted by time, as in the file of a gesture: x, y, polarity and time in milliseconds.

    Gestures 0 to 7 move in a straight line, each in a different direction. Gestures 8 and 9 move in circles, in
    opposite directions. Gesture 10 does not move.
    """
    milliseconds = int(random.integers(800, 1600))
    count = 4 * milliseconds
    t = np.sort(random.integers(0, milliseconds, count))
    begin, phase = random.uniform(32, 96, 2), random.uniform(0, 2 * np.pi)
    if gesture < 8:
        angle = np.full(count, 2 * np.pi * gesture / 8)
        centre = begin + 0.1 * t[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    elif gesture < 10:
        turn = phase + (1 if gesture == 8 else -1) * 2 * np.pi * t / 800
        centre = begin + 24 * np.stack([np.cos(turn), np.sin(turn)], 1)
        angle = turn + (np.pi / 2 if gesture == 8 else -np.pi / 2)
    else:
        centre, angle = np.broadcast_to(begin, (count, 2)), random.uniform(0, 2 * np.pi, count)
    offset = random.normal(0, 8, (count, 2))
    # Pixels in front of a bright blob become brighter, and pixels behind it become darker. A fifth of the events is
    # noise.
    polarity = (offset * np.stack([np.cos(angle), np.sin(angle)], 1)).sum(1) > 0
    place = np.floor(centre + offset) % 128
    noise = random.random(count) < 0.2
    place[noise] = random.integers(0, 128, (noise.sum(), 2))
    polarity[noise] = random.random(noise.sum()) < 0.5
    return np.column_stack([place, polarity, t]).astype(np.float64)


def write_recordings(folder: Path, seed: int, users: tuple[int, int] = (20, 10)) -> None:
    """Writes two archives and their folders, like the files that tonic stores after a download.

    There is one folder for each user and light condition, with one file for each gesture.

    Args:
        folder: folder to write to.
        seed: seed of the recordings.
        users: number of users for training, and number of held-out users. Each user has 11 recordings. tonic needs at
            least 100 recordings.
    """
    random = np.random.default_rng(seed)
    for part, count in zip(("Train", "Test"), users, strict=True):
        top = folder / "DVSGesture" / f"ibmGesture{part}"
        for user in range(count):
            recordings = top / f"user{user + 1:02d}_synthetic"
            recordings.mkdir(parents=True)
            for gesture in range(CLASSES):
                np.save(recordings / f"{gesture}.npy", moving_blob(gesture, random))
        with tarfile.open(f"{top}.tar.gz", "w:gz", compresslevel=1) as archive:
            archive.add(top, top.name)


def main(arguments: list[str]) -> int:
    description = "Trains a spiking network on an event camera's recordings."
    options = parser("events", description, "tonic.datasets.DVSGesture", 20, 16)
    options.add_argument("--paper", action="store_true", help="use the network of Fang et al.")
    options.add_argument("--width", type=positive, default=128, help="channels for --paper")
    settings = options.parse_args(arguments)
    torch.manual_seed(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        if settings.data is None:
            torch.set_num_threads(1)  # the frames are small, so threads would wait for each other
            write_recordings(Path(folder), settings.seed)
            print("no --data: synthetic recordings in the format of the gesture data set, not gestures")
        root = str(settings.data or folder)
        # The events are read and converted to frames once, and the frames stay in memory.
        made_frames = frames_of_paper() if settings.paper else frames()
        training, held_out = (
            MemoryCachedDataset(DVSGesture(root, train=train, transform=made_frames)) for train in (True, False)
        )
        print(f"{len(training)} recordings to train on, {len(held_out)} held out")
        network: nn.Module = Network(settings.backend)
        if settings.paper:
            network = PaperNetwork(settings.backend, settings.width)
        network.to(settings.device)
        history = fit(network, training, held_out, settings, pad_sequences)
        draw(network, history, pad_sequences([held_out[number] for number in range(32)]), settings)
    report(history, "20 frames" if settings.paper else f"frames of {WINDOW // 1000} ms", settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
