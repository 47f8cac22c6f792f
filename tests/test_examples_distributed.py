"""`examples/distributed.py`: two processes train a network, and one process continues from their checkpoint."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load, one_thread

EXAMPLE = Path(__file__).parents[1] / "examples" / "distributed.py"


def run_on_two_processes(*options: str, folder: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), "--device", "cpu", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variables that torchrun would set for a single process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.long(all_but=["fsdp"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_resumes_with_another_number_of_processes(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], single_process: None
) -> None:
    options = ("--strategy", strategy, "--checkpoint", str(tmp_path / "kept"), "--epochs", "2")
    output = run_on_two_processes(*options, folder=tmp_path)
    match = re.search(r"held-out accuracy ([0-9.]+%) on 2 processes", output)
    assert match is not None, output
    assert float(match[1].rstrip("%")) > 80
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["epoch_1", "epoch_2"]
    with one_thread():
        assert load("examples/distributed.py").main(["--device", "cpu", *options]) == 0
    assert f"resumed after 2 epochs, accuracy {match[1]}\n" in capsys.readouterr().out


def test_error_without_torchrun_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        load("examples/distributed.py").main([])
    assert "torchrun --standalone" in capsys.readouterr().err
