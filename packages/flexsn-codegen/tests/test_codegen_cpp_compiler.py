"""C++ programs are compiled once, stored and reused. Failed compilations are reported."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shlex
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec, InputLayout, KernelSource, emit_core, forward_source
from flexsn_codegen.errors import CacheFolderError, CompilationError, CompilerMissingError
from flexsn_codegen.targets.cpp import CPP, CppKernel, _compiler, _kernel, inlined, why_no_compiler
from flexsn_graph import trace_step

STEPS, LANES = 9, 1000  # three blocks of 256 elements, and a partial block


@pytest.fixture(autouse=True)
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a separate cache folder for the test, with no library loaded."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_compiler, "_libraries", weakref.WeakValueDictionary())
    monkeypatch.setattr(_kernel, "_programs", weakref.WeakValueDictionary())


def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.5 * v + x
    return torch.relu(h), h


def compile_kernel() -> CppKernel:
    trace = trace_step(step, 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    core: CoreSource = emit_core(trace.forward, "step", prune=True, target=CPP)
    spec = ForwardSpec(
        inputs=(InputLayout(),),
        states=(None,),
        state_dtypes=(torch.float32,),
        lifted=(),
        outputs=(True,),
        state_seqs=(False,),
        final_states=(True,),
    )
    source: KernelSource = forward_source("relu", core, spec)
    assert [port.name for port in source.params] == ["input_0", "output_0", "final_state_0"]
    assert source.sizes == ("T", "NCL")
    compiled = CPP.compile(source)
    assert isinstance(compiled, CppKernel)
    return compiled


def assert_runs(threads: int = 1) -> None:
    x = torch.randn(STEPS, LANES)
    output, final = torch.empty(STEPS, LANES), torch.empty(LANES)
    run = compile_kernel().compiled((torch.float32,) * 3, 256)
    run([x.data_ptr(), output.data_ptr(), final.data_ptr(), STEPS, LANES, threads])
    v = torch.zeros(LANES)
    for t in range(STEPS):
        expected, v = step(x[t], v)
        assert torch.equal(output[t], expected)
    assert torch.equal(final, v)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_kernels_run_in_several_threads(threads: int, compiler: None) -> None:
    assert_runs(threads)


def test_stored_libraries_are_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: None) -> None:
    assert_runs()
    (library,) = (tmp_path / "cache").glob("*.so")
    assert library.stat().st_mode & 0o077 == 0

    def refuse(source: str) -> bytes:
        raise AssertionError("the library exists already")

    monkeypatch.setattr(_compiler, "_compile", refuse)
    monkeypatch.setattr(_compiler, "_libraries", {})
    monkeypatch.setattr(_kernel, "_programs", {})
    assert_runs()


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"no library"), lambda path: path.unlink()])
def test_damaged_libraries_are_compiled_again(spoil: Callable[[Path], object], tmp_path: Path, compiler: None) -> None:
    for _ in range(2):
        assert_runs()
        gc.collect()  # closes the library, to which no object refers now
        (library,) = (tmp_path / "cache").glob("*.so")
        spoil(library)
    assert_runs()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_library_remains_open_while_its_program_is_referenced(tmp_path: Path, compiler: None) -> None:
    def is_open() -> bool:
        (library,) = (tmp_path / "cache").glob("*.so")
        return str(library) in Path("/proc/self/maps").read_text()

    dtypes = (torch.float32,) * 3
    run, again = compile_kernel().compiled(dtypes, 256), compile_kernel().compiled(dtypes, 256)
    assert run is again
    assert is_open()
    del again
    gc.collect()
    assert is_open()
    del run
    gc.collect()
    assert not is_open()
    assert_runs()


@pytest.mark.skipif(not shutil.which("g++"), reason="reads the report of g++")
def test_kernels_in_another_source_are_vectorised_despite_its_flags(tmp_path: Path) -> None:
    """Turns GCC's vectoriser off, like Inductor. The file contains two kernels, and one of them twice."""
    first, second = (inlined(compile_kernel().text((torch.float32,) * 3, block)) for block in (256, 512))
    source = tmp_path / "both.cpp"
    source.write_text(first.source + second.source + first.source)
    flags = ["-std=c++17", "-O3", "-fno-tree-loop-vectorize", "-fopt-info-vec-optimized", "-fPIC", "-shared"]
    command = ["g++", *flags, str(source), "-o", str(tmp_path / "both.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loop vectorized" in done.stderr
    library = ctypes.CDLL(str(tmp_path / "both.so"))
    x = torch.randn(STEPS, LANES)
    for part in (first, second):
        output, final = torch.empty(STEPS, LANES), torch.empty(LANES)
        arguments = [x.data_ptr(), output.data_ptr(), final.data_ptr(), STEPS, LANES, 1]
        library[part.name]((ctypes.c_int64 * len(arguments))(*arguments))
        v = torch.zeros(LANES)
        for t in range(STEPS):
            expected, v = step(x[t], v)
            assert torch.equal(output[t], expected)
        assert torch.equal(final, v)


def test_missing_compiler_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "CXX names 'no-such-compiler -O2'" in (why_no_compiler() or "")
    with pytest.raises(CompilerMissingError, match="Unset it, or name a C"):
        compile_kernel().compiled((torch.float32,) * 3, 256)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert (why_no_compiler() or "").startswith("there is no C++ compiler (g++, clang++, c++) on the path. Install one")


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("clang++"), reason="there is no clang++ here")
def test_missing_openmp_of_clang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    try:
        assert_runs(threads=2)
    except CompilationError as error:
        remedy = str(error)
    else:
        return
    assert "apt install libomp-dev" in remedy, "the error does not name the missing OpenMP of clang"


def test_refusal_of_the_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{shlex.quote(sys.executable)} -c 'raise SystemExit(1)'")  # needs no search of the path
    with pytest.raises(CompilationError, match=r"the C\+\+ compiler rejects a generated kernel\. Name another"):
        compile_kernel().compiled((torch.float32,) * 3, 256)


def test_compiler_that_writes_no_file_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{shlex.quote(sys.executable)} -c 'raise SystemExit(0)'")
    with pytest.raises(CompilationError, match=r"compiler reports success, but wrote no file\. Name another"):
        compile_kernel().compiled((torch.float32,) * 3, 256)


FULL = "a kernel cannot be compiled in .*No space left on device.* Make room there, or name another folder in TMPDIR"


def test_full_disk_during_compilation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('kernel.s: No space left on device')"
    monkeypatch.setenv("CXX", f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}")
    with pytest.raises(CacheFolderError, match=FULL):
        compile_kernel().compiled((torch.float32,) * 3, 256)


def test_full_temporary_folder_is_reported(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    def write(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(CacheFolderError, match=FULL):
        compile_kernel().compiled((torch.float32,) * 3, 256)


@pytest.mark.long
def test_processes_can_compile_one_kernel_at_once(tmp_path: Path, compiler: None) -> None:
    code = (
        "import sys, test_codegen_cpp_compiler as tests\n"
        "print('ready', flush=True)\nsys.stdin.readline()\ntests.assert_runs()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.communicate()
    assert [process.returncode for process in running] == [0, 0]
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_users_code_occurs_only_in_comments(compiler: None) -> None:
    def hostile(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x + v, v * 2.0  # */ #error \

    trace = trace_step(hostile, 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    core = emit_core(trace.forward, "new", prune=True, target=CPP)
    assert "#error \\\n" not in core.source
    assert core.name.startswith("_new_")  # `new` is a reserved word of C++


def test_kernels_of_a_changed_wrapper_script_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "wrapper"
    monkeypatch.setenv("CXX", str(wrapper))
    environments = []
    for option in ("-O1", "-O2"):
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(shutil.which("g++") or "c++")} "$@" {option}\n')
        wrapper.chmod(0o755)
        _compiler._describe_environment_of.cache_clear()
        environments.append(_compiler._describe_environment())
    _compiler._describe_environment_of.cache_clear()
    assert environments[0] != environments[1]
