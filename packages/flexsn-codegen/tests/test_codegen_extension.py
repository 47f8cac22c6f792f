"""C++ modules are compiled at their first use and stored. Incomplete files are replaced."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import warnings
from pathlib import Path

import pytest

from flexsn_codegen.errors import CompilationError
from flexsn_codegen.targets.cpp import Extension

SOURCE = """
#include <Python.h>
static PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "tiny"};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&tiny); }
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))


def test_extension_is_compiled_once_and_loaded() -> None:
    assert Extension("tiny", SOURCE).kept() is None
    path = Extension("tiny", SOURCE).build()
    again = Extension("tiny", SOURCE)
    assert again.kept() == path
    assert again.build() == path
    assert again.load(path).__name__ == "tiny"
    assert Extension("tiny", SOURCE + " ").kept() is None


@pytest.mark.parametrize("length", [0, 1000, -1])
def test_incomplete_file_is_replaced(length: int) -> None:
    extension = Extension("tiny", SOURCE)
    path = extension.build()
    path.write_bytes(path.read_bytes()[:length])
    assert extension.kept() is None
    extension.load(extension.build())


def test_errors_name_the_failure_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompilationError, match="rejects the module tiny"):
        Extension("tiny", "no C++").build()
    script = tmp_path / "compiler"
    for text, message in {"#!/bin/sh\nexit 0\n": "wrote no file", "#!/nowhere/sh\n": "cannot be run"}.items():
        script.write_text(text)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))
        with pytest.raises(CompilationError, match=message):
            Extension("tiny", SOURCE).build()


def test_forked_child_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = []
    compiled = Extension._compile

    def forking(extension: Extension) -> bytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork in a process with threads issues a warning
            child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        children.append(child)
        return compiled(extension)

    monkeypatch.setattr(Extension, "_compile", forking)
    try:
        Extension("tiny", SOURCE).build()
        with (tmp_path / "cache" / "tiny.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
