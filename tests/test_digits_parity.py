"""Training of the digits demo. With the same seed, losses and accuracies are equal on all backends."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BACKENDS = ("hop", "triton")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module  # `dataclass` looks up the module of a class in `sys.modules`
    spec.loader.exec_module(module)
    return module


def learn(
    digits: ModuleType, backend: str, device: str, *, samples: int, steps: int, epochs: int, brightness: float
) -> tuple[list[float], list[float]]:
    """Returns the loss and the held-out accuracy after each epoch. With a high brightness, neurons fire from the first
    batch on.
    """
    torch.manual_seed(0)
    data = digits.load(torch.device(device), seed=0)
    data.train_x, data.train_y = brightness * data.train_x[:samples], data.train_y[:samples]
    data.test_x = brightness * data.test_x
    network = digits.Network(steps, backend).to(device)
    losses, accuracies = digits.train(network, data, epochs, seed=0)
    assert network.hidden.explain().startswith(backend)
    return losses, accuracies


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_backends_learn_equally_on_the_cpu(digits: ModuleType) -> None:
    settings: dict[str, Any] = {"samples": 192, "steps": 3, "epochs": 2, "brightness": 16.0}
    losses, accuracies = learn(digits, "torch", "cpu", **settings)
    assert accuracies[-1] > 0.3, "the network has not begun to learn"
    for backend in BACKENDS:
        other_losses, other_accuracies = learn(digits, backend, "cpu", **settings)
        assert other_losses == pytest.approx(losses, rel=1e-4)
        # A difference in the last bit of a weight may change one of the 360 predictions.
        assert other_accuracies == pytest.approx(accuracies, abs=1.5 / 360)


@pytest.mark.gpu
def test_backends_learn_equally_on_the_gpu(digits: ModuleType) -> None:
    settings: dict[str, Any] = {"samples": 1437, "steps": 8, "epochs": 25, "brightness": 1.0}
    losses, accuracies = learn(digits, "torch", "cuda", **settings)
    assert accuracies[-1] > 0.95
    for backend in BACKENDS:
        other_losses, other_accuracies = learn(digits, backend, "cuda", **settings)
        assert other_losses[0] == pytest.approx(losses[0], rel=1e-2)
        assert other_accuracies[-1] == pytest.approx(accuracies[-1], abs=0.015)
