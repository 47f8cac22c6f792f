"""Generated sources on disk: files are private, complete and reused."""

from __future__ import annotations

import builtins
import errno
import inspect
import multiprocessing
import os
import resource
import shutil
import signal
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
from flexsn_codegen.source import _cache as cache

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


def make_source(name: str = "kernel", number: int = 1) -> str:
    return KERNEL.format(name=name, number=number)


def test_folder_and_files_are_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        compile_triton_code_str(make_source(), "kernel")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [p for p in folder.iterdir() if p.suffix == ".py"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in files] == [0o600]
    assert not list(folder.glob("*.tmp"))


def test_equal_sources_share_a_kernel(folder: Path) -> None:
    first, again, other = (compile_triton_code_str(make_source(number=n), "kernel") for n in (1, 1, 2))
    assert first is again
    assert first is not other


def test_limited_number_of_modules_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the most recently requested modules are kept, and that a kernel in use works without its module."""
    monkeypatch.setattr(cache, "_MOST_LOADED", 4)
    monkeypatch.setattr(cache, "_loaded", {})
    before = set(sys.modules)
    first = compile_triton_code_str(make_source(number=0), "kernel")
    compiled = {n: compile_triton_code_str(make_source(number=n), "kernel") for n in range(1, 10)}
    assert compile_triton_code_str(make_source(number=6), "kernel") is compiled[6]
    compile_triton_code_str(make_source(number=10), "kernel")
    assert compile_triton_code_str(make_source(number=6), "kernel") is compiled[6]
    generated = {name for name in set(sys.modules) - before if name.startswith("flexsn_codegen._generated.")}
    assert len(generated) == len(cache._loaded) == 4
    assert first.fn.__globals__["kernel"] is first
    assert "x + 0" in inspect.getsource(first.fn)


def test_verbose_reports_whether_the_file_was_written_or_reused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        compile_triton_code_str(make_source(number=3), "kernel", verbose=True)
    first, second = capsys.readouterr().out.splitlines()
    assert "wrote" in first
    assert "reused" in second
    assert str(folder) in first


def test_changed_file_is_written_again(folder: Path) -> None:
    compile_triton_code_str(make_source(number=4), "kernel")
    (path,) = folder.glob("*.py")
    path.write_text("raise RuntimeError('changed')")
    name_space: dict[str, Any] = {}
    compile_triton_code_str(make_source(number=4), "kernel", name_space=name_space)
    assert path.read_text() == make_source(number=4)


@pytest.mark.parametrize("name", ["../../evil", "a/b", "a\x00b", "..", "", "a" * 300, "\n"])
def test_hostile_kernel_names_stay_in_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(KernelNameError):
        compile_triton_code_str(make_source(number=5), name)
    assert {p.parent for p in folder.rglob("*.py")} == {folder}
    assert list(folder.parent.iterdir()) == [folder]


def test_name_space_is_injected_and_updated(folder: Path) -> None:
    code = make_source().replace("+ 1", "+ OFFSET").replace("import triton\n", "import triton\nSEEN = OFFSET\n", 1)
    name_space: dict[str, Any] = {"OFFSET": 7}
    kernel = compile_triton_code_str(code, "kernel", name_space=name_space)
    assert name_space["kernel"] is kernel
    assert name_space["SEEN"] == 7
    assert "__name__" not in name_space


def test_stale_name_is_not_mistaken_for_the_kernel(folder: Path) -> None:
    name_space: dict[str, Any] = {"kernel": object()}
    with pytest.raises(KernelNameError, match=r"defines no 'kernel'; it defines .*'other'") as caught:
        compile_triton_code_str(make_source("other"), "kernel", name_space=name_space)
    assert isinstance(caught.value, ValueError)


def test_stale_kernel_is_replaced(folder: Path) -> None:
    stale = object()
    name_space: dict[str, Any] = {"kernel": stale}
    assert compile_triton_code_str(make_source(), "kernel", name_space=name_space) is not stale
    assert name_space["kernel"] is not stale


def test_kernel_name_may_begin_with_two_underscores(folder: Path) -> None:
    assert compile_triton_code_str(make_source("__kernel"), "__kernel") is not None


def test_source_that_fails_leaves_no_module(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        compile_triton_code_str("1 / 0\n", "kernel")
    assert not any(name.startswith("flexsn_codegen._generated.kernel_") and "1 / 0" in name for name in sys.modules)
    with pytest.raises(ZeroDivisionError):
        compile_triton_code_str("1 / 0\n", "kernel")


def test_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o722)
    with pytest.raises(CacheFolderError, match="chmod 700") as caught:
        compile_triton_code_str(make_source(), "kernel")
    assert isinstance(caught.value, RuntimeError)


def test_link_as_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(CacheFolderError, match="is a link"):
        cache_folder()


def test_link_instead_of_a_file_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    compile_triton_code_str(make_source(number=6), "kernel")
    (path,) = folder.glob("*.py")
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(make_source(number=6))
    path.unlink()
    path.symlink_to(elsewhere)
    compile_triton_code_str(make_source(number=6), "kernel", name_space={})
    assert not path.is_symlink()


def test_temporary_folder_replaces_a_read_only_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.delenv("FLEXSN_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    real = Path.mkdir

    def mkdir(self: Path, *args: Any, **keywords: Any) -> None:
        # `mkdir` is replaced, because a read-only mode does not prevent an administrator from writing.
        if home in self.parents:
            raise OSError(30, "Read-only file system")
        real(self, *args, **keywords)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert cache_folder() == temporary / f"flexsn-{os.getuid()}"


def test_racing_threads_share_one_kernel(folder: Path) -> None:
    kernels: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        kernels.append(compile_triton_code_str(make_source(number=8), "kernel"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len({id(kernel) for kernel in kernels}) == 1


FORK = multiprocessing.get_context("fork")


def forks(test: Any) -> Any:
    """Ignores the warnings of Python 3.12 about forks in a process with threads, such as the threads of torch."""
    for warning in (".*use of fork", ".*multi-threaded, use of fork"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}:DeprecationWarning")(test)
    return test


def race(ready: Any, prunes: bool) -> None:
    """Runs in a child process."""
    ready.wait()
    for number in range(20):
        code = "#" * 200_000 + f"\nkernel = {number}\n"
        assert compile_triton_code_str(code, "kernel", name_space={}) == number
        if prunes:
            prune_cache(-1)


@forks
@pytest.mark.parametrize("other", ["writes", "prunes"])
def test_racing_processes_read_complete_files(folder: Path, other: str) -> None:
    """Tests two processes that write equal sources at once, and a process whose files another process removes."""
    ready = FORK.Barrier(2)
    children = [FORK.Process(target=race, args=(ready, action == "prunes")) for action in ("writes", other)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert not list(folder.glob(".*.tmp"))
    if other == "writes":
        assert len(list(folder.glob("*.py"))) == 20


def compile_number(number: int) -> None:
    """Runs in a child process: loads a source that the parent has loaded, and another source."""
    name_space: dict[str, Any] = {}
    assert compile_triton_code_str(make_source(number=number), "kernel") is not None
    assert (
        compile_triton_code_str(make_source(number=number + os.getpid()), "kernel", name_space=name_space) is not None
    )
    assert inspect.getsource(name_space["kernel"].fn).rstrip().endswith(str(number + os.getpid()))


@forks
def test_forked_processes_can_load_sources(folder: Path) -> None:
    compile_triton_code_str(make_source(number=11), "kernel")
    children = [FORK.Process(target=compile_number, args=(11,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len(list(folder.glob("*.py"))) == 4
    compile_number(11)


@forks
def test_fork_while_another_thread_loads_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests a fork while a thread holds a lock. Without a new lock, the child would wait forever for this thread."""
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        done.wait()

    monkeypatch.setattr(builtins, "wait", wait, raising=False)
    slow = threading.Thread(target=compile_triton_code_str, args=("wait()\nkernel = 1", "kernel"))
    slow.start()
    inside.wait()
    child = FORK.Process(target=lambda: sys.exit(compile_triton_code_str("kernel = 3", "kernel")))
    child.start()
    child.join()
    done.set()
    slow.join()
    assert child.exitcode == 3


# -- a file or a folder that is not in the expected state -----------------------------------------------


@pytest.mark.parametrize("content", [b"\xff\xfe\x00not a text", b"", b"x = 1\n\x00"])
def test_wrong_content_of_a_file_is_replaced(folder: Path, content: bytes) -> None:
    compile_triton_code_str(make_source(number=12), "kernel")
    (path,) = folder.glob("*.py")
    path.write_bytes(content)
    compile_triton_code_str(make_source(number=12), "kernel", name_space={})
    assert path.read_text() == make_source(number=12)


def test_empty_folder_instead_of_a_file_is_replaced_and_a_full_folder_is_named(folder: Path) -> None:
    compile_triton_code_str(make_source(number=13), "kernel")
    (path,) = folder.glob("*.py")
    path.unlink()
    path.mkdir()
    compile_triton_code_str(make_source(number=13), "kernel", name_space={})
    assert path.read_text() == make_source(number=13)
    path.unlink()
    path.mkdir()
    (path / "somebody's").touch()
    with pytest.raises(CacheFolderError, match=r"cannot be stored in .*kernel.*\.py: .*FLEXSN_CACHE_DIR"):
        compile_triton_code_str(make_source(number=13), "kernel", name_space={})
    assert (path / "somebody's").exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_cache_variable_that_names_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "file" / below))
    with pytest.raises(CacheFolderError, match=r"file.*: (File exists|Not a directory).*FLEXSN_CACHE_DIR"):
        compile_triton_code_str(make_source(), "kernel")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("mode", "refused"), [(0o777, True), (0o707, True), (0o1777, False), (0o755, False), (0o770, True)], ids=oct
)
@pytest.mark.parametrize("below", ["cache", "some/way/down"])
def test_private_folder_below_a_shared_folder_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, refused: bool, below: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, 12345) if os.getuid() == 0 else None
    if mode == 0o770 and os.getuid() != 0:
        pytest.skip("only the administrator can give a folder to a group of others")
    shared.chmod(mode)
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(shared / below))
    if not refused:
        assert cache_folder() == shared / below
        return
    with pytest.raises(CacheFolderError, match=rf"is private, but others can write to {shared}, .*chmod go-w"):
        cache_folder()


def test_link_in_the_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "link" / "cache"))
    with pytest.raises(CacheFolderError, match="open"):
        cache_folder()


# -- a full disk, a read-only home ---------------------------------------------------------------------


def compile_on_a_full_disk() -> None:
    """Runs in a child process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    code = "x = 1\n" * 5000 + "kernel = 1\n"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # files cannot grow further, as on a full disk
    try:
        compile_triton_code_str(code, "kernel")
        message = "nothing"
    except CacheFolderError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith("generated kernels cannot be stored in ")
    assert message.endswith("or set FLEXSN_CACHE_DIR to another folder.")
    assert compile_triton_code_str(code, "kernel") == 1


@forks
@pytest.mark.long(all_but=["True"])
@pytest.mark.parametrize("explicit", [True, False])
def test_full_disk_is_named_and_no_file_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explicit: bool
) -> None:
    for name, variable in (("home", "HOME"), ("temporary", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("FLEXSN_CACHE_DIR", raising=False)
    if explicit:
        monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    child = FORK.Process(target=compile_on_a_full_disk)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert len(list(tmp_path.rglob("kernel_*.py"))) == 1  # the file that the second call wrote
    assert not list(tmp_path.rglob("*.tmp"))


def test_temporary_folder_replaces_a_full_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.delenv("FLEXSN_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    real = os.replace

    def replace(source: str, target: Path) -> None:
        if home in target.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for _ in range(2):
        compile_triton_code_str(make_source(number=14), "kernel", name_space={})
    assert [path.read_text() for path in temporary.rglob("*.py")] == [make_source(number=14)]
    assert not [path for path in home.rglob("*") if path.is_file()]


def as_somebody_else(temporary: Path) -> None:
    """Runs in a child process."""
    os.environ.pop("FLEXSN_CACHE_DIR", None)
    os.environ |= {"HOME": "/", "TMPDIR": str(temporary)}
    tempfile.tempdir = None  # the parent process has already determined it
    os.setuid(12345)
    kernel = compile_triton_code_str("kernel = 1", "kernel")
    (temporary / "said").write_text(f"{kernel} {cache_folder()}")


@forks
@pytest.mark.skipif(os.getuid() != 0, reason="needs an administrator, who can become somebody else")
def test_user_without_a_home_folder_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests a read-only home: another user runs with a folder of the administrator as home."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        temporary.chmod(0o1777)
        monkeypatch.setattr(cache, "_require_triton", lambda: None)
        child = FORK.Process(target=as_somebody_else, args=(temporary,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert (temporary / "said").read_text() == f"1 {temporary}/flexsn-12345"
    finally:
        shutil.rmtree(temporary)


def test_old_files_are_pruned_and_used_files_are_kept(folder: Path) -> None:
    compile_triton_code_str(make_source(number=9), "kernel")
    compile_triton_code_str(make_source(number=10), "kernel")
    old = time.time() - 100 * 86400
    for path in folder.glob("*.py"):
        os.utime(path, (old, old))
    compile_triton_code_str(make_source(number=10), "kernel")
    assert prune_cache(30) == 1
    assert [path.read_text() for path in folder.glob("*.py")] == [make_source(number=10)]


def test_import_works_without_triton_and_its_use_names_the_missing_package() -> None:
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


def test_package_needs_only_graph_and_no_numpy() -> None:
    root = Path(flexsn_codegen.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        for other in ("flexsn_runtime", "flexsn_hop", "flexsn_nn", "numpy"):
            assert f"import {other}" not in text, path
            assert f"from {other}" not in text, path
