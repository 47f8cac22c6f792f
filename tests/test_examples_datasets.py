"""`examples/datasets/`: the examples train on data in files. torchvision and tonic can read the files that the examples
write.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scripts import ROOT, load, one_thread
from training import History, draw

from flexsn_nn import plot

# READERS contains the package that reads the files of an example. LEARNS contains a number of epochs, and an accuracy
# in percent that the example then exceeds. Guesses would reach 10, 9 and 5 %.
NAMES = ["images", "events", "audio"]
READERS = {"images": "torchvision", "events": "tonic", "audio": "tonic"}
LEARNS = {"images": (1, 80.0), "events": (4, 40.0), "audio": (3, 50.0)}


def load_example(name: str) -> ModuleType:
    pytest.importorskip(READERS[name])
    return load(f"examples/datasets/{name}.py")


def write_small_data(name: str, folder: Path) -> None:
    """Writes the data of an example to `folder`, with few samples, so that a test is short."""
    module = load_example(name)
    if name == "images":
        generator = torch.Generator().manual_seed(0)
        (folder / "MNIST" / "raw").mkdir(parents=True)
        for prefix, count in (("train", 70), ("t10k", 40)):
            path = str(folder / "MNIST" / "raw" / prefix)
            images = torch.randint(256, (count, 28, 28), generator=generator)
            module.write_idx(Path(f"{path}-images-idx3-ubyte"), images)
            module.write_idx(Path(f"{path}-labels-idx1-ubyte"), torch.arange(count) % 10)
    elif name == "events":
        module.write_recordings(folder, seed=0, users=(10, 10))
    else:
        module.write_words(folder, seed=0, counts=(60, 40))


@pytest.mark.long(all_but=["audio"])
@pytest.mark.parametrize("name", NAMES)
def test_example_without_arguments_learns_and_draws(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load_example(name)
    epochs, least_accuracy = LEARNS[name]
    # The example runs as a user runs it: in an empty folder, and without the settings of the tests.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "datasets" / f"{name}.py"), "--epochs", str(epochs)],
        cwd=tmp_path,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(tmp_path),
            # PyTorch's compiler creates its cache folder when it is imported, by default in TMPDIR.
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("no --data: ")  # the output says that the real data are missing
    match = re.search(rf"^held-out accuracy ([\d.]+)% after {epochs} epochs", process.stdout, re.MULTILINE)
    assert match is not None, process.stdout
    assert float(match[1]) > least_accuracy
    assert f"epoch {epochs}/{epochs}:" in process.stderr  # the progress bar
    assert [path.name for path in tmp_path.iterdir()] == [
        f"{name}.png"
    ]  # the example deletes the data that it generated
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@one_thread()
@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_equals_an_uninterrupted_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_data(name, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    main = load_example(name).main

    def run(epochs: int, folder: str) -> str:
        assert main(["--data", "data", "--checkpoint", folder, "--epochs", str(epochs), "--batch", "30"]) == 0
        return capsys.readouterr().out

    def load_checkpoint(folder: str) -> dict[str, Any]:
        checkpoint: dict[str, Any] = torch.load(tmp_path / folder / "last.pt", weights_only=True)
        return checkpoint

    assert "no --data" not in run(2, "straight")
    run(1, "broken")
    stopped = load_checkpoint("broken")
    assert "resumed after 1 epochs" in run(2, "broken")
    straight, broken = load_checkpoint("straight"), load_checkpoint("broken")
    assert len(straight["history"]["losses"]) == 2
    assert broken["history"] == straight["history"]
    for key, weights in straight["network"].items():
        assert torch.equal(broken["network"][key], weights)
    assert any(not torch.equal(stopped["network"][key], weights) for key, weights in straight["network"].items())
    # The checkpoint already contains all epochs.
    output = run(2, "broken")
    assert "epoch 2/2" not in output
    assert f"{straight['history']['accuracies'][-1]:.2%} after 2 epochs" in output


@pytest.mark.long
@one_thread()
def test_recurrent_layers_learn_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_data("audio", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    module = load_example("audio")
    weights = [name for name, _ in module.Network("torch", recurrent=True).named_parameters() if "recurrent" in name]
    assert weights == ["layers.2.recurrent.weight", "layers.4.recurrent.weight"]
    assert module.main(["--data", "data", "--recurrent", "--epochs", "1", "--batch", "30"]) == 0
    assert "held-out accuracy" in capsys.readouterr().out


@pytest.mark.long(all_but=["audio"])
@pytest.mark.usefixtures("loops")
@one_thread()
@pytest.mark.parametrize("name", ["events", "audio"])
def test_networks_of_the_paper_accept_the_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_data(name, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    arguments = ["--data", "data", "--paper", "--width", "4", "--epochs", "1", "--batch", "30", "--lr", "0.01"]
    assert load_example(name).main(arguments) == 0
    assert "held-out accuracy" in capsys.readouterr().out


def test_torchvision_reads_the_written_images(tmp_path: Path) -> None:
    images = load_example("images")
    from sklearn.datasets import load_digits

    images.write_digits(tmp_path, seed=0)
    training, held_out = (images.MNIST(tmp_path, train=train) for train in (True, False))
    assert (len(training), len(held_out)) == (1437, 360)
    labels = torch.cat([training.targets, held_out.targets])
    assert labels.bincount().tolist() == np.bincount(load_digits().target).tolist()
    pixels = torch.cat([training.data, held_out.data])
    assert pixels.shape == (1797, 28, 28)
    assert pixels[:, 4:24, 4:24].amax((1, 2)).float().mean() > 200
    assert not pixels[:, :4].any()


def test_tonic_reads_the_written_recordings(tmp_path: Path) -> None:
    events = load_example("events")
    events.write_recordings(tmp_path, seed=0, users=(10, 10))
    recordings = events.DVSGesture(str(tmp_path), train=False)
    framed = events.DVSGesture(str(tmp_path), train=False, transform=events.frames())
    assert len(recordings) == 110
    assert sorted(recordings.targets) == sorted(list(range(11)) * 10)
    lengths = set()
    for index in range(0, 110, 9):
        events_of_recording, target = recordings[index]
        stored = np.load(recordings.data[index])
        assert target == int(Path(recordings.data[index]).stem)
        assert events_of_recording["t"].tolist() == (stored[:, 3] * 1000).tolist()  # times are in microseconds
        assert (np.diff(events_of_recording["t"]) >= 0).all()
        assert set(events_of_recording["p"]) == {False, True}
        frames, _ = framed[index]
        assert frames.shape[1:] == (2, events.SIDE, events.SIDE)
        # Each event is in exactly one frame, at its pixel on the smaller sensor.
        counted = np.zeros(frames.shape, dtype=int)
        elapsed = events_of_recording["t"] - events_of_recording["t"][0]
        indices = (
            elapsed // events.WINDOW,
            events_of_recording["p"].astype(int),
            events_of_recording["y"] // 4,
            events_of_recording["x"] // 4,
        )
        np.add.at(counted, indices, 1)
        assert (frames == counted).all()
        lengths.add(len(frames))
    assert len(lengths) > 3


def test_tonic_reads_the_written_words(tmp_path: Path) -> None:
    audio = load_example("audio")
    audio.write_words(tmp_path, seed=0, counts=(40, 20))
    words = audio.SHD(str(tmp_path), train=True)
    counted = audio.SHD(str(tmp_path), train=True, transform=audio.frames())
    assert (len(words), len(audio.SHD(str(tmp_path), train=False))) == (40, 20)
    assert [int(words[index][1]) for index in range(40)] == list(range(20)) * 2
    random = np.random.default_rng(0)
    lengths = set()
    for index in range(40):
        seconds, channels = audio.synthetic_word(index % 20, random)
        spikes, _ = words[index]
        assert spikes["t"] == pytest.approx(1e6 * seconds, rel=1e-3, abs=10)  # times are float16, as in the real files
        assert spikes["x"].tolist() == channels.astype(int).tolist()
        counts, _ = counted[index]
        assert counts.shape[1:] == (1, audio.CHANNELS)
        assert counts.sum() == len(seconds)
        lengths.add(len(counts))
    assert len(lengths) > 10


@pytest.mark.long(all_but=["events"])
@one_thread()
@pytest.mark.parametrize("name", ["events", "audio"])
def test_drawn_rates_exclude_padding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the drawn rates of a padded batch are the means of the rates that its samples have in separate
    runs.
    """
    module = load_example(name)
    drawings: list[dict[str, float]] = []
    firing_rates = plot.firing_rates

    def record(rates: dict[str, float], ax: Any) -> Any:
        drawings.append(rates)
        return firing_rates(rates, ax=ax)

    monkeypatch.setattr(plot, "firing_rates", record)
    write_small_data(name, tmp_path / "data")
    torch.manual_seed(0)
    network = module.Network("torch")
    options = Namespace(device="cpu", out=tmp_path / "a.png")
    dataset_class = module.DVSGesture if name == "events" else module.SHD
    dataset = dataset_class(str(tmp_path / "data"), train=False, transform=module.frames())
    samples = [dataset[index] for index in (0, 3, 7, 11)]
    batches = [module.pad_sequences(samples), *(module.pad_sequences([sample]) for sample in samples)]
    assert len(batches[0][1].unique()) > 1
    for batch in batches:
        draw(network, History([1.0], [0.5]), batch, options)
    batch_rates, *sample_rates = drawings
    assert batch_rates
    for layer, rate in batch_rates.items():
        assert rate == pytest.approx(sum(rates[layer] for rates in sample_rates) / 4, rel=1e-5)
        assert 0 < rate < 1


@pytest.mark.parametrize("epochs", ["0", "-1", "x"])
def test_epochs_must_be_a_positive_integer(epochs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_example("images").main(["--epochs", epochs])
    assert f"'{epochs}' is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_example_learns_in_compiled_kernels(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    epochs, least_accuracy = LEARNS[name]
    main = load_example(name).main
    assert main(["--device", "cuda", "--backend", "triton", "--epochs", str(epochs)]) == 0
    match = re.search(rf"held-out accuracy ([\d.]+)% after {epochs} epochs", capsys.readouterr().out)
    assert match is not None
    assert float(match[1]) > least_accuracy
