"""Classifies images. torchvision reads the files of MNIST.

    python examples/datasets/images.py [--data DIR] [--epochs 10] [--checkpoint DIR] [--out images.png]

With `--data DIR`, torchvision reads MNIST from DIR, or downloads it to DIR. Without `--data`, the script uses
scikit-learn's bundled digits, which are also handwritten. These are 1797 images of 8 x 8 pixels. The script enlarges
them, writes them to files in the format of MNIST, and reads these files. A fifth of the images is held out. The
accuracy is then measured on these digits, and not on MNIST.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import MNIST
from training import draw, fit, parser, report

from flexsn_nn import LIF, OverTime, encoding
from flexsn_nn.surrogate import ATan

STEPS = 6


class Network(nn.Module):
    """A network from pixels `[B, 1, 28, 28]` to scores `[B, 10]`. The image is a constant current over all steps."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.code = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(16))
        self.spiking = nn.Sequential(
            LIF(surrogate_function=ATan(), backend=backend),
            OverTime(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)),
            LIF(surrogate_function=ATan(), backend=backend),
            nn.Flatten(2),
        )
        self.readout = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        current = encoding.direct(self.code(images), STEPS)  # computed once; the steps are views
        scores: Tensor = self.readout(self.spiking(current).mean(0))
        return scores


def write_idx(path: Path, values: Tensor) -> None:
    """Writes a file in the format of MNIST.

    The file contains two zeros, the code 8 for bytes, the number of dimensions, the sizes of the dimensions, and the
    values.
    """
    head = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    path.write_bytes(head + values.to(torch.uint8).numpy().tobytes())


def write_digits(folder: Path, seed: int) -> None:
    """Writes scikit-learn's digits in four files like those of MNIST.

    A digit has 20 x 20 pixels, in the middle of an image of 28 x 28 pixels.
    """
    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images = pad(interpolate(small, size=(20, 20), mode="bilinear"), (4, 4, 4, 4)).squeeze(1).mul(255).round()
    training, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, settings in (("train", training), ("t10k", held_out)):
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images[settings])
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", torch.tensor(labels[settings]))


def main(arguments: list[str]) -> int:
    description = "Trains a spiking network on images."
    settings = parser("images", description, "torchvision.datasets.MNIST", 10, 32).parse_args(arguments)
    torch.manual_seed(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        if settings.data is None:
            torch.set_num_threads(1)  # the images are small, so threads would wait for each other
            write_digits(Path(folder), settings.seed)
            print("no --data: scikit-learn's digits in the format of MNIST, not MNIST")
        root = settings.data or Path(folder)
        training, held_out = (
            MNIST(root, train=train, download=settings.data is not None, transform=transforms.ToTensor())
            for train in (True, False)
        )
        print(f"{len(training)} images to train on, {len(held_out)} held out")
        network = Network(settings.backend).to(settings.device)
        history = fit(network, training, held_out, settings)
        draw(network, history, default_collate([held_out[number] for number in range(32)]), settings)
    report(history, f"{STEPS} time steps", settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
