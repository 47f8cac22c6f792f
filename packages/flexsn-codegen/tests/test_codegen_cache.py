"""Generated sources on disk: private, whole, reused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import flexsn_codegen
from flexsn_codegen import (
    CacheFolderError,
    KernelNameError,
    TritonMissingError,
    cache_folder,
    compile_triton_code_str,
    prune_cache,
)

KERNEL = """import triton
import triton.language as tl


@triton.jit
def {name}(x):
    return x + {number}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(name: str = "kernel", number: int = 1) -> str:
    return KERNEL.format(name=name, number=number)


def test_folder_and_files_are_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        compile_triton_code_str(source(), "kernel")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [p for p in folder.iterdir() if p.suffix == ".py"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in files] == [0o600]
    assert not list(folder.glob("*.tmp"))


def test_same_source_same_object_and_another_is_another(folder: Path) -> None:
    first, again, other = (compile_triton_code_str(source(number=n), "kernel") for n in (1, 1, 2))
    assert first is again
    assert first is not other


def test_verbose_says_written_then_reused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        compile_triton_code_str(source(number=3), "kernel", verbose=True)
    first, second = capsys.readouterr().out.splitlines()
    assert "wrote" in first
    assert "reused" in second
    assert str(folder) in first


def test_a_file_that_was_changed_is_written_again(folder: Path) -> None:
    compile_triton_code_str(source(number=4), "kernel")
    (path,) = folder.glob("*.py")
    path.write_text("raise RuntimeError('changed')")
    name_space: dict[str, Any] = {}
    compile_triton_code_str(source(number=4), "kernel", name_space=name_space)
    assert path.read_text() == source(number=4)


@pytest.mark.parametrize("name", ["../../evil", "a/b", "a\x00b", "..", "", "a" * 300, "\n"])
def test_hostile_kernel_names_stay_in_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(KernelNameError):
        compile_triton_code_str(source(number=5), name)
    assert {p.parent for p in folder.rglob("*.py")} == {folder}
    assert list(folder.parent.iterdir()) == [folder]


def test_name_space_is_injected_and_updated(folder: Path) -> None:
    code = source().replace("+ 1", "+ OFFSET").replace("import triton\n", "import triton\nSEEN = OFFSET\n", 1)
    name_space: dict[str, Any] = {"OFFSET": 7}
    kernel = compile_triton_code_str(code, "kernel", name_space=name_space)
    assert name_space["kernel"] is kernel
    assert name_space["SEEN"] == 7
    assert "__name__" not in name_space


def test_a_stale_name_does_not_pass_for_the_kernel(folder: Path) -> None:
    name_space: dict[str, Any] = {"kernel": object()}
    with pytest.raises(KernelNameError, match=r"defines no 'kernel'; it defines .*'other'") as caught:
        compile_triton_code_str(source("other"), "kernel", name_space=name_space)
    assert isinstance(caught.value, ValueError)


def test_a_stale_kernel_is_replaced(folder: Path) -> None:
    stale = object()
    name_space: dict[str, Any] = {"kernel": stale}
    assert compile_triton_code_str(source(), "kernel", name_space=name_space) is not stale
    assert name_space["kernel"] is not stale


def test_names_with_two_underscores_are_kernels_too(folder: Path) -> None:
    assert compile_triton_code_str(source("__kernel"), "__kernel") is not None


def test_a_source_that_fails_leaves_no_module(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        compile_triton_code_str("1 / 0\n", "kernel")
    assert not any(name.startswith("flexsn_codegen._generated.kernel_") and "1 / 0" in name for name in sys.modules)
    with pytest.raises(ZeroDivisionError):
        compile_triton_code_str("1 / 0\n", "kernel")


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o722)
    with pytest.raises(CacheFolderError, match="chmod 700") as caught:
        compile_triton_code_str(source(), "kernel")
    assert isinstance(caught.value, RuntimeError)


def test_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(CacheFolderError, match="is a link"):
        cache_folder()


def test_a_link_in_place_of_a_file_is_replaced_not_followed(folder: Path, tmp_path: Path) -> None:
    compile_triton_code_str(source(number=6), "kernel")
    (path,) = folder.glob("*.py")
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(source(number=6))
    path.unlink()
    path.symlink_to(elsewhere)
    compile_triton_code_str(source(number=6), "kernel", name_space={})
    assert not path.is_symlink()


def test_read_only_home_falls_back_to_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.delenv("FLEXSN_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    real = Path.mkdir

    def mkdir(self: Path, *args: Any, **keywords: Any) -> None:
        # The administrator may write everywhere, so that a mode alone is no test.
        if home in self.parents:
            raise OSError(30, "Read-only file system")
        real(self, *args, **keywords)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert cache_folder() == temporary / f"flexsn-{os.getuid()}"


def test_threads_racing_get_one_kernel(folder: Path) -> None:
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        found.append(compile_triton_code_str(source(number=8), "kernel"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(kernel) for kernel in found}) == 1


RACE = """
import sys, time
from pathlib import Path
from flexsn_codegen import _cache
go, number = Path(sys.argv[1]), sys.argv[2]
code = "x = 1\\n" * 20000 + f"kernel = {number}\\n"
_cache._require_triton = lambda: None
while not go.exists():
    time.sleep(0.001)
for _ in range(20):
    assert _cache.compile_triton_code_str(code, "kernel", name_space={}) == int(number)
"""


def test_processes_racing_see_whole_files(folder: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", RACE, str(go), "5"], env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    time.sleep(0.1)
    go.touch()
    errors = [process.communicate()[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert not list(folder.glob(".*.tmp"))


def test_old_files_are_pruned_and_used_ones_kept(folder: Path) -> None:
    compile_triton_code_str(source(number=9), "kernel")
    compile_triton_code_str(source(number=10), "kernel")
    old = time.time() - 100 * 86400
    for path in folder.glob("*.py"):
        os.utime(path, (old, old))
    compile_triton_code_str(source(number=10), "kernel")
    assert prune_cache(30) == 1
    assert [path.read_text() for path in folder.glob("*.py")] == [source(number=10)]


def test_without_triton_the_package_imports_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, flexsn_codegen
kernel = flexsn_codegen.pointwise(torch.relu).source(torch.empty(4, device="meta"))
try:
    flexsn_codegen.compile_triton_code_str(kernel.source, kernel.name)
except ImportError as error:
    print(type(error).__name__, error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TritonMissingError")
    assert "pip install triton" in done.stdout
    assert issubclass(TritonMissingError, ImportError)


def test_the_package_needs_no_sibling_and_no_numpy() -> None:
    root = Path(flexsn_codegen.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        for other in ("flexsn_graph", "flexsn_runtime", "flexsn_hop", "flexsn_nn", "numpy"):
            assert f"import {other}" not in text, path
            assert f"from {other}" not in text, path
