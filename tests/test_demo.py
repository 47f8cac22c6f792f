"""The digits demo, run as a new user runs it. The network learns, the demo draws a figure, and an error is one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load

from flexsn_runtime import _availability

DEMO = Path(__file__).parent.parent / "examples" / "digits.py"


def run(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # The tests turn Triton's interpreter on, but for a new user, it is off.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # relative paths would be wrong in the demo's folder
    return subprocess.run(
        [sys.executable, str(DEMO), *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def read_accuracy(output: str) -> float:
    match = re.search(r"^held-out accuracy ([0-9.]+)% after", output, re.MULTILINE)
    assert match is not None, output
    return float(match[1])


def test_demo_learns_and_draws_a_figure(tmp_path: Path) -> None:
    process = run("--device", "cpu", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert read_accuracy(process.stdout) >= 95.0
    unavailable = "torch: compiled kernels cannot run: there is no C"
    assert process.stdout.startswith(("backend cpp: the tensors are on 'cpu'", f"backend {unavailable}"))
    assert process.stdout.count("held-out accuracy") == 26  # 25 lines for the epochs, and one line for the result
    assert "epoch  1/25" in process.stderr  # the progress bar
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_seed_determines_the_result(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--epochs", "2", "--seed", "5", "--out", "a.png")
    lines = [run(*options, folder=tmp_path).stdout.splitlines()[:3] for _ in range(2)]
    assert lines[0] == lines[1]


@pytest.mark.long
def test_backends_reach_the_same_accuracy(tmp_path: Path, compiler: None) -> None:
    accuracies = {}
    for backend, description in (("cpp", "cpp: asked for"), ("torch", "torch: asked for"), ("hop", "hop: asked for")):
        process = run("--device", "cpu", "--epochs", "3", "--backend", backend, folder=tmp_path)
        assert process.returncode == 0, process.stderr
        assert f"backend {description}" in process.stdout
        accuracies[backend] = read_accuracy(process.stdout)
    assert max(accuracies.values()) - min(accuracies.values()) < 1.0


@pytest.mark.gpu
def test_compiled_kernels_reach_the_same_accuracy(tmp_path: Path) -> None:
    process = run("--device", "cuda", "--backend", "triton", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "backend triton" in process.stdout
    assert read_accuracy(process.stdout) >= 95.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "tirton"), "tirton"),
        (("--device", "gpu"), "--device: 'gpu' cannot be used"),
        (("--steps", "0"), "--steps: '0' is not a whole number above 0"),
        (("--epochs", "many"), "--epochs: 'many' is not a whole number above 0"),
        (("--seed", "x"), "--seed"),
        (("--out", "nowhere/a.png"), "--out: there is no folder 'nowhere'"),
        (("--out", "a.jpg"), "--out: 'a.jpg' does not end in .png"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_print_one_line(
    tmp_path: Path,
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        load("examples/digits.py").main(list(options))
    assert_one_line(exit_info.value.code, *capsys.readouterr(), words)


def test_unavailable_kernels_print_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_availability, "_INTERPRETED", False)  # for a new user, the interpreter is off
    monkeypatch.chdir(tmp_path)
    status = load("examples/digits.py").main(["--device", "cpu", "--backend", "triton"])
    assert_one_line(status, *capsys.readouterr(), "set TRITON_INTERPRET=1")


def assert_one_line(status: object, out: str, error: str, words: str) -> None:
    assert status == 2
    assert out == ""
    assert len(error.splitlines()) == 1
    assert error.startswith("digits: ")
    assert words in error
