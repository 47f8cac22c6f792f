"""The command line shows, compiles and lists kernels. Mistakes and `prune` are tested in `test_codegen_offline`."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from flexsn_codegen import supported_ops
from flexsn_codegen.__main__ import main
from flexsn_codegen.targets.cpp import CPP, why_no_compiler

MODULE = """
import torch


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def shifted(x, y):
    return x + 2 * y
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "codegen_commanded.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "codegen_commanded", raising=False)
    return "codegen_commanded"


def test_entry_point_is_the_main_function() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    name, _, attribute = project["scripts"]["flexsn-codegen"].partition(":")
    assert getattr(import_module(name), attribute) is main


@pytest.mark.long
def test_show_of_a_function_that_cuts_takes_shapes(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["show", f"{module}:swiglu", "--arguments", "bfloat16:3x16", "--gradient", "--target"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "codegen_commanded.py:7: return torch.nn.functional.silu(gate) * up" in out
    first, second = out.split("# --- the gradient ---")
    # The forward reads two halves and writes one half. The gradient reads three and writes two.
    assert (first.count("dev.load("), first.count("dev.store(")) == (2, 1)
    assert (second.count("dev.load("), second.count("dev.store(")) == (3, 2)


def test_show_prints_cpp_for_the_cpu(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{module}:shifted", "--target", "cpp"]) == 0
    out = capsys.readouterr().out
    assert "template <int64_t BLOCK" in out
    assert "@triton.jit" not in out


def test_compile_writes_the_files_of_each_target(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["sm_90", "gfx942", *(["cpp"] if why_no_compiler() is None else [])]
    assert main(["compile", f"{module}:shifted", "--target", *targets, "--output", str(tmp_path / "made")]) == 0
    written = {path.name.partition(".")[2]: path for path in (tmp_path / "made").iterdir()}
    expected = {"py", "sm_90.ptx", "sm_90.cubin", "gfx942.amdgcn", "gfx942.hsaco"}
    assert written.keys() == expected | ({"cpp", "so"} if "cpp" in targets else set())
    assert ".target sm_90" in written["sm_90.ptx"].read_text()
    assert written["gfx942.hsaco"].read_bytes()[:4] == written["sm_90.cubin"].read_bytes()[:4] == b"\x7fELF"
    out = capsys.readouterr().out
    assert all(str(path) in out for path in written.values())


def test_compile_requires_a_target(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", f"{module}:shifted", "--target"]) == 2
    assert "there is no target: pass --target" in capsys.readouterr().err


def test_ops_lists_every_op_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["prims.mul.default"] == "linear in 0 or 1; continuous in 0 and 1; triton, cpp"
    assert lines["prims.where.default"] == "linear in 1 and 2; continuous in 1 and 2; exact; triton, cpp"
    for target, name in ((CPP, "cpp"), (None, "triton")):
        ops = supported_ops(target) if target else supported_ops()
        assert all(name in lines[str(op)].rsplit("; ", 1)[-1] for op in ops)


def test_ops_can_be_selected_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "gammac"]) == 0
    assert capsys.readouterr().out == "prims.igammac.default: triton, cpp\n"
    assert main(["ops", "nothing of the kind"]) == 2
