"""Short runs of all examples, with arguments of the command line. Each example prints the expected lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import ROOT, load, one_thread

# For each example: arguments for a short run, and a pattern that the output matches.
RUNS = {
    "convert": (["--steps", "4", "--neurons", "20"], r"hands its state on: 0 of 320 spikes differ"),
    "evidence": (["--steps", "20", "--updates", "2"], r"tau learned: \d+ and \d+ steps after 2 updates, accuracy "),
    "long_sequence": (
        ["--steps", "640", "--samples", "32", "--epochs", "1"],
        r"waves, 640 steps: loss \d\.\d+ to \d\.\d+, accuracy ",
    ),
    "mixed_precision": (["--updates", "2"], r"float32 on torch.bfloat16: 0\.86"),
    "recurrent": (["--steps", "14", "--epochs", "1"], r"recurrent: loss \d\.\d+ to \d\.\d+, accuracy .* over 14 steps"),
    "resonator": (["--steps", "40", "--updates", "2"], r"four rhythms with noise: loss \d\.\d+ to \d\.\d+, accuracy "),
    "shapes": (["--steps", "8", "--updates", "2"], r"winner takes all: loss \d\.\d+ to \d\.\d+, accuracy "),
    "vowels": (["--data", "made", "--epochs", "1"], r"of 48 recordings in 8 streams; scores differ .* by \de-0"),
    "truncated_bptt": (["--steps", "64", "--chunk", "16", "--passes", "1"], r"the last chunk differs by 0\.0e\+00 "),
}
# Other test files run these examples.
TESTED_ELSEWHERE = {"digits", "distributed", "gated_activation", "images", "events", "audio", "training"}


def test_every_example_has_a_run() -> None:
    assert {path.stem for path in ROOT.glob("examples/**/*.py")} == RUNS.keys() | TESTED_ELSEWHERE


@pytest.mark.long(all_but=["convert", "truncated_bptt"])
@one_thread()
@pytest.mark.parametrize("name", sorted(RUNS))
def test_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, pattern = RUNS[name]
    assert load(f"examples/{name}.py").main(arguments) == 0
    assert re.search(pattern, capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []  # no example writes files by default


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(RUNS))
def test_example_runs_in_compiled_kernels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, pattern = RUNS[name]
    assert load(f"examples/{name}.py").main([*arguments, "--device", "cuda", "--backend", "triton"]) == 0
    out = capsys.readouterr().out
    # Chunks change the order of sums over time, so gradients only agree up to rounding.
    assert re.search(pattern.replace(r"0\.0e\+00", r"\d\.\de[+-]\d+"), out)
