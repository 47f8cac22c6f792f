"""Files that `show --standalone` prints run without any package of this project."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexsn_codegen.__main__ import main
from flexsn_codegen.targets.cpp import why_no_compiler

FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv"]
MODULE = """
import torch
from flexsn_codegen import pointwise


@pointwise
def limited(x, gate, limit):
    return (x * torch.sigmoid(gate)).clamp(max=limit) * limit**0.5


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.tanh(x) * self.weight


scale = Scale()
"""
LIMITED = ["--arguments", "float32:4x24", "float32:24", "3.0", "--gradient"]
# Imports a file in a process that cannot import any package of this project.
ALONE = """
import importlib.util, os, sys
import torch
for name in ("graph", "codegen", "runtime", "hop", "nn"):
    sys.modules[f"flexsn_{name}"] = None
spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
alone = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
"""
# Ends the process without the usual shutdown, in which Python 3.12 aborts if an autograd thread takes the GIL.
END = """
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "codegen_alone.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "codegen_alone", raising=False)
    return tmp_path


def write_triton_file(folder: Path, *arguments: str) -> Path:
    """Returns the path of a file in Triton, which a process without Triton's interpreter prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "flexsn_codegen", "show", "--standalone", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file = folder / "kernels_alone.py"
    file.write_text(done.stdout)
    assert "import flexsn" not in done.stdout
    assert "from flexsn" not in done.stdout
    return file


def run_alone(file: Path, code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-W", "ignore", "-c", ALONE + code + END, str(file)]
    done = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(why_no_compiler() is not None, reason="needs a C++ compiler")
def test_file_in_cpp_runs_alone(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--standalone", "codegen_alone:limited", *LIMITED, "--target", "cpp"]) == 0
    text = capsys.readouterr().out
    command = "python -m flexsn_codegen show --standalone codegen_alone:limited --arguments float32:4x24 float32:24 3.0"
    assert command in text.splitlines()[2]
    (module / "alone.cpp").write_text(text)
    library = module / "alone.so"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++17", *FLAGS, "-shared", "-fPIC", "alone.cpp", "-o", str(library)], check=True)
    forward = ctypes.CDLL(str(library)).limited
    # Sizes differ from those in the command. Numbers are arguments.
    x, gate = torch.randn(1001, 40), torch.randn(40)
    for limit in (0.5, 0.25):
        result = torch.empty_like(x)
        # Values that the function computes from its number are arguments of the kernel, in the order of first use.
        signature = text.split('extern "C" void limited(')[1].split(")")[0]
        numbers = [line.split()[-1].rstrip(",") for line in signature.splitlines() if "host_number" in line]
        values = {0: 1.0, 1: 1.0, 2: limit, 3: limit, 4: limit**0.5}
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in (x, gate, result)]
        sizes = [ctypes.c_int64(n) for n in (x.numel(), 40, 0, 1)]
        floats = [ctypes.c_float(values[i]) for i in range(len(numbers))]
        forward(*addresses, *sizes, *floats, ctypes.c_int64(1))
        torch.testing.assert_close(result, (x * torch.sigmoid(gate)).clamp(max=limit) * limit**0.5)


def test_file_in_triton_runs_alone(module: Path) -> None:
    file = write_triton_file(module, "codegen_alone:limited", *LIMITED)
    assert "show --standalone codegen_alone:limited --arguments float32:4x24" in file.read_text()
    actual = run_alone(
        file,
        """
print(alone._forward_words(0.25)[0] == alone._forward_words(0.25)[0] != alone._forward_words(0.5)[0])
print(alone._terms([4, 24], [0, 1]), alone.limited.__name__)
from triton.backends.compiler import GPUTarget
import triton
(step,) = alone._BACKWARD["steps"]
kernel = step["kernel"]
names = kernel.arg_names
signature = {n: "*fp32" if n.endswith("_ptr") else "constexpr" if n == "BLOCK" else "i32" for n in names}
source = triton.compiler.ASTSource(kernel, signature, {(names.index("BLOCK"),): 1024})
print("ld.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
""",
    )
    assert actual.split() == ["True", "[(1,", "24,", "1)]", "limited", "True"]


def test_modules_and_functions_that_cut_are_shown(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, arguments in (("scale", ["float32:3x6"]), ("swiglu", ["float32:3x16"]), ("limited", LIMITED[1:4])):
        assert main(["show", f"codegen_alone:{path}", "--arguments", *arguments, "--target", "cpp"]) == 0
        assert "template <int64_t BLOCK" in capsys.readouterr().out


def test_unknown_target_writes_no_file(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", "codegen_alone:swiglu", "--arguments", "float32:3x16", "--output", "made", "--target"]
    assert main([*command, "cpp", "h100"]) == 2
    assert "there is no target 'h100'. Targets are cpp" in capsys.readouterr().err
    assert not (module / "made").exists()


@pytest.mark.gpu
def test_files_in_triton_compute_and_differentiate(module: Path) -> None:
    file = write_triton_file(module, "codegen_alone:limited", *LIMITED)
    actual = run_alone(
        file,
        """
x, gate = torch.randn(301, 40, device="cuda", requires_grad=True), torch.randn(40, device="cuda", requires_grad=True)
for a, limit in ((x, 0.5), (x.t().contiguous().t(), 0.25), (x[:, :40], 1.0)):
    eager = (a * torch.sigmoid(gate)).clamp(max=limit) * limit**0.5
    ours = alone.limited(a, gate, limit)
    torch.testing.assert_close(ours, eager)
    given = torch.rand_like(eager)
    both = [torch.autograd.grad(y, [x, gate], given) for y in (ours, eager)]
    for mine, true in zip(*both):
        torch.testing.assert_close(mine, true)
print("done")
""",
    )
    assert actual.strip() == "done"
    file = write_triton_file(module, "codegen_alone:swiglu", "--arguments", "float32:3x16", "--gradient")
    actual = run_alone(
        file,
        """
x = torch.randn(1001, 16, device="cuda", requires_grad=True)
gate, up = x.chunk(2, -1)
eager, ours = torch.nn.functional.silu(gate) * up, alone.swiglu(x)
torch.testing.assert_close(ours, eager)
given = torch.rand_like(eager)
torch.testing.assert_close(*(torch.autograd.grad(y, x, given)[0] for y in (ours, eager)))
print("done")
""",
    )
    assert actual.strip() == "done"
