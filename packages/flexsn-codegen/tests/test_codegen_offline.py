"""Compilation for absent GPUs, commands of the command line, and stored sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codegen_cores import CORES, core_graph

from flexsn_codegen import (
    DENSE,
    TRITON,
    ForwardSpec,
    InputLayout,
    KernelSource,
    OfflineCompileError,
    OfflineJob,
    compile_offline,
    emit_core,
    forward_source,
    generate_triton_code_str,
    pointwise,
)
from flexsn_codegen.__main__ import main
from flexsn_codegen.targets.triton._offline import _compiler_process, _describe_task

GOLDEN = Path(__file__).parent / "golden"
COMMAND = "python packages/flexsn-codegen/tests/test_codegen_offline.py"


def generate_scan(name: str, *, fast_math: bool = False) -> KernelSource:
    graph, states = core_graph(name)
    spec = ForwardSpec(
        inputs=(InputLayout(),),
        states=(DENSE,) * states,
        state_dtypes=(torch.float32,) * states,
        lifted=(),
        outputs=(True,),
        state_seqs=(False,) * states,
        final_states=(True,) * states,
        chunk=4,
    )
    return forward_source(name, emit_core(graph, name, prune=True, fast_math=fast_math), spec)


def generate_golden(name: str) -> str:
    return f"# Made by: {COMMAND}\n{generate_triton_code_str(core_graph(name)[0].graph, name)[0]}"


@pytest.mark.parametrize("name", CORES)
def test_sources_equal_the_stored_sources(name: str) -> None:
    stored = (GOLDEN / f"{name}.py").read_text(encoding="utf-8")
    assert generate_golden(name) == stored, f"if the change is intended, run `{COMMAND}`"


def test_cores_compile_for_absent_gpus() -> None:
    gate = pointwise(lambda x, g: x * torch.nn.functional.gelu(g)).source(*torch.empty(2, 8, device="meta"))
    jobs = [
        OfflineJob(kernel, target)
        for kernel in (*map(generate_scan, CORES), gate)
        for target in ("sm_80", "sm_90", "gfx942")
    ]
    for job, use in zip(jobs, compile_offline(jobs), strict=True):
        assert use.target == job.target
        assert 8 <= use.registers <= 128, job
        assert use.spilled_bytes == use.local_bytes == use.shared_bytes == 0, job
        assert len(use.binary) > 1000
        assert f"{use.registers} registers" in str(use)


@pytest.mark.long
def test_scan_fuses_products_and_sums_only_with_fast_math() -> None:
    jobs = [OfflineJob(generate_scan("adaptive", fast_math=f), "sm_90", fast_math=f) for f in (False, True)]
    exact, fast = (use.assembly for use in compile_offline(jobs))
    assert "fma.rn.f32" not in exact
    assert "mul.rn.f32" in exact
    assert "fma.rn" in fast


@pytest.mark.long
def test_special_functions_compile() -> None:
    def functions(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        special = torch.special
        return (
            special.digamma(x) + special.zeta(x, x) + special.i0e(x) + special.i1e(x),
            special.modified_bessel_k1(x) + special.spherical_bessel_j0(x) + special.ndtri(x),
            torch.frexp(x)[1] + torch.gcd(n, n + 6) + n**n + (n << n) + n % 5,
            torch.nextafter(x.bfloat16(), x.bfloat16() + 1),
        )

    arguments = torch.empty(8, device="meta"), torch.empty(8, dtype=torch.int32, device="meta")
    kernel = pointwise(functions).source(*arguments)
    dtypes = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int32, torch.bfloat16]
    (use,) = compile_offline([OfflineJob(kernel, "sm_90", dtypes)])
    assert len(use.binary) > 10_000


BROKEN = KernelSource("kernel", "import triton\n@triton.jit\ndef kernel(BLOCK):\n    nothing()\n", (), (), TRITON)


def test_wrong_jobs_are_refused() -> None:
    with pytest.raises(OfflineCompileError, match="'h100' is not a target; sm_80"):
        compile_offline([OfflineJob(generate_scan("lif"), "h100")])
    with pytest.raises(OfflineCompileError, match="2 dtypes were given"):
        compile_offline([OfflineJob(generate_scan("lif"), "sm_90", [torch.float32] * 2)])
    with pytest.raises(OfflineCompileError, match="nothing"):
        compile_offline([OfflineJob(BROKEN, "sm_90", ())])


def compile_lif() -> int:
    """Compiles a kernel in the separate process, and returns the identifier of the process."""
    (use,) = _compiler_process.compile([_describe_task(OfflineJob(generate_scan("lif"), "sm_90"))])
    assert use["registers"] > 0
    assert _compiler_process._process is not None
    return _compiler_process._process.pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_of_a_fork_leaves_its_parents_process_alone() -> None:
    identifier = compile_lif()
    child = os.fork()
    if child == 0:
        is_reset = _compiler_process._process is None
        _compiler_process.stop()
        os._exit(0 if is_reset else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert compile_lif() == identifier


def test_one_process_compiles_until_it_ends() -> None:
    identifier = compile_lif()
    with pytest.raises(OfflineCompileError, match="nothing"):
        _compiler_process.compile([_describe_task(OfflineJob(BROKEN, "sm_90", ()))])
    assert compile_lif() == identifier
    process = _compiler_process._process
    assert process is not None
    process.kill()
    process.wait()
    assert compile_lif() != identifier
    with pytest.raises(OfflineCompileError, match=r"process failed[^$]*KeyError"):
        _compiler_process.compile([{}])
    assert _compiler_process._process is None


MODULE = """
import torch


def gated(x, gate):
    return x * torch.sigmoid(gate)


def sorted_(x):
    return torch.sort(x)[0]


def broken(x):
    return x.nothing


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "codegen_shown.py").write_text(MODULE)
    (tmp_path / "codegen_misspelt.py").write_text("def f(x: return x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "codegen_shown", raising=False)
    return "codegen_shown"


def test_show_prints_graph_source_and_resource_use(module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "flexsn_codegen", "show", f"{module}:gated"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prims.exp.default" in done.stdout
    assert "def gated_" in done.stdout
    assert "# codegen_shown.py:6: return x * torch.sigmoid(gate)" in done.stdout
    assert "# sm_90: " in done.stdout


@pytest.mark.long
def test_show_prints_the_gradient(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{module}:gated", "--gradient", "--arguments", "bfloat16", "float32:0", "--target"]) == 0
    out = capsys.readouterr().out
    assert "def gated_backward_" in out
    assert "dev.round_bfloat16" in out


@pytest.mark.long
def test_show_takes_precision_and_fast_math(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arguments", "float16", "float16", "--precision", "float32", "--fast-math", "--target", "sm_90"]
    assert main(["show", f"{module}:gated", *arguments]) == 0
    out = capsys.readouterr().out
    assert "dev.fast_exp(" in out
    assert out.count("dev.round_float16(") == 1
    assert "# sm_90: " in out


def test_prune_reports_the_files_that_it_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    pointwise(torch.neg)(torch.zeros(3))
    (source,) = (tmp_path / "cache").glob("*.py")
    os.utime(source, (0, 0))
    for count in (1, 0):
        assert main(["prune", "--days", "30"]) == 0
        assert capsys.readouterr().out == f"deleted {count} files from {tmp_path / 'cache'}\n"
    assert not source.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["show", "codegen_shown:nothing"], 2, "'codegen_shown' has no 'nothing'"),
        (["show", "codegen_shown"], 2, "not of the form module:function"),
        (["show", "codegen_absent:f"], 2, "no module 'codegen_absent'"),
        (["show", "codegen_shown:number"], 2, "is a int, not a function"),
        (["show", "codegen_shown:gated", "--arguments", "float99"], 2, "'float99' is not an argument"),
        (["show", "codegen_shown:gated", "--precision", "single"], 2, "no precision 'single'"),
        (["show", "codegen_shown:sorted_"], 1, "aten.sort"),
        (["show", "codegen_shown:broken"], 1, "codegen_shown.py:14: return x.nothing"),
        (["show", "codegen_misspelt:f"], 2, "codegen_misspelt.py:1: "),
        (["show", "codegen_shown:gated", "--target", "h100"], 2, "there is no target 'h100'. Targets are cpp"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    module: str, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for core in CORES:
        (GOLDEN / f"{core}.py").write_text(generate_golden(core), encoding="utf-8")
