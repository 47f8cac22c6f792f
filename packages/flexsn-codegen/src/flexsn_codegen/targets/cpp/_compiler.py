"""Compiles C++ sources to shared libraries, stores them in the cache folder, and loads them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from flexsn_codegen.errors import CacheFolderError, CompilationError, CompilerMissingError
from flexsn_codegen.source._cache import find_kept, keep

_VARIABLE = "CXX"
_CANDIDATES = ("g++", "clang++", "c++")

# Fast math is off, so that the results of arithmetic are bitwise equal to those of eager mode. Without floating-point
# traps and errno, which no kernel uses, the compiler can vectorize conditions and functions. Integers wrap around, as
# in torch.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv"),
)
_HEADERS = Path(__file__).parent
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Libraries whose functions are in use. All other libraries are unloaded, so that memory does not grow with each
# compiled source.
_libraries: weakref.WeakValueDictionary[str, ctypes.CDLL] = weakref.WeakValueDictionary()
_locks: dict[str, threading.Lock] = {}  # one lock per source, so that different sources compile at the same time


# In a forked child, no thread would release a lock that was held at the fork, so the child starts without locks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


def why_no_compiler() -> str | None:
    """The reason why this machine cannot compile C++, with a remedy. `None` if there is a compiler."""
    if _find_compiler() is not None:
        return None
    named = os.environ.get(_VARIABLE)
    if named:
        return f"{_VARIABLE} names {named!r}, which does not exist. Unset it, or name a C++ compiler."
    remedy = {
        "darwin": "`xcode-select --install`",
        "win32": "the Build Tools for Visual Studio are not supported; use WSL",
    }.get(sys.platform, "`apt install g++`, `dnf install gcc-c++`, or conda's `cxx-compiler`")
    return f"there is no C++ compiler ({', '.join(_CANDIDATES)}) on the path. Install one: {remedy}."


def load(source: str) -> ctypes.CDLL:
    """Loads the library of a source. The source is compiled unless the library is in the cache folder.

    The library is loaded once per process. It is closed when the library object and all functions from
    `library["name"]` are deleted.

    Raises:
        CompilerMissingError: there is no compiler.
        CompilationError: the compiler rejects the source.
        CacheFolderError: see `cache_folder`.
    """
    compiler()
    digest = hashlib.sha256(f"{_describe_environment()}\n{source}".encode()).hexdigest()[:32]
    with _locks.setdefault(digest, threading.Lock()):
        library = _libraries.get(digest)
        if library is None:
            library = _libraries[digest] = _load_or_compile(f"kernel_{digest}.so", source)
    return library


def library_of(source: str) -> bytes:
    """Compiles a source, without the cache. Returns the content of the library's file. Raises the errors of `load`."""
    return _compile(source)


def _load_or_compile(name: str, source: str) -> ctypes.CDLL:
    path = find_kept(name)
    if path is not None:
        with contextlib.suppress(OSError):  # the file is not a valid library, or another process has deleted it
            return _open(path)
    path, _ = keep(name, _compile(source))
    try:
        return _open(path)
    except OSError as error:
        raise CacheFolderError(
            f"a kernel was compiled, but cannot be loaded: {error}. If that folder allows no programs (noexec), "
            "name another folder in FLEXSN_CACHE_DIR."
        ) from error


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    weakref.finalize(library, _close, library._handle).atexit = False
    return library


def _close(handle: int) -> None:
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    close(handle)


def _compile(source: str) -> bytes:
    with in_a_folder() as folder:
        text, compiled, library = (folder / f"kernel.{kind}" for kind in ("cpp", "o", "so"))
        text.write_text(source, encoding="utf-8")
        command = compiler()
        options = [*FLAGS, *_list_openmp_options(), *_list_include_options(source)]
        run_compiler([*command, *options, "-c", str(text), "-o", str(compiled)])
        run_compiler([*command, "-shared", *_list_linker_options(), str(compiled), "-o", str(library)])
        return library.read_bytes()


@contextlib.contextmanager
def in_a_folder() -> Iterator[Path]:
    """Creates a temporary folder for a compilation, and deletes it at the end.

    Raises:
        CacheFolderError: a file in the temporary folder cannot be created, read or written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="flexsn-") as folder:
            yield Path(folder)
    except OSError as error:
        raise _make_no_space_error(str(error)) from error


def _make_no_space_error(reason: str) -> CacheFolderError:
    return CacheFolderError(
        f"a kernel cannot be compiled in {tempfile.gettempdir()}: {reason}. Make room there, or name another folder in "
        "TMPDIR."
    )


def run_compiler(command: Sequence[str], name: str = "a generated kernel") -> None:
    """Runs a command of the compiler.

    Args:
        name: description of the source that the command compiles, for the error message.

    Raises:
        CompilationError: the compiler rejects the source, writes no file, or cannot be run.
        CacheFolderError: the disk is full.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        message = f"the C++ compiler cannot be run: {error}. Name another compiler in {_VARIABLE}."
        raise CompilationError(message) from error
    if process.returncode != 0:
        disk_error = next((text for text in map(os.strerror, _DISK_FULL_ERRORS) if text in process.stderr), None)
        if disk_error is not None:
            raise _make_no_space_error(disk_error)
        remedy = f"Name another compiler in {_VARIABLE}, or report this."
        if "-lomp" in process.stderr:
            remedy = f"The compiler lacks OpenMP: `apt install libomp-dev`, or name g++ in {_VARIABLE}."
        raise CompilationError(
            f"the C++ compiler rejects {name}. {remedy}\n{shlex.join(command)}\n{process.stderr[:4000]}"
        )
    if "-o" in command and not Path(command[command.index("-o") + 1]).exists():
        raise CompilationError(
            f"the C++ compiler reports success, but wrote no file. Name another compiler in {_VARIABLE}.\n"
            f"{shlex.join(command)}"
        )


def compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        CompilerMissingError: there is no compiler.
    """
    command = _find_compiler()
    if command is None:
        raise CompilerMissingError(why_no_compiler())
    return command


def _find_compiler() -> list[str] | None:
    key = os.environ.get(_VARIABLE, ""), os.environ.get("PATH")
    command = _compilers.get(key)  # cached, because searching the path takes as long as running some kernels
    if command is None:
        named = shlex.split(key[0])
        candidates = named[:1] or _CANDIDATES
        path = next(filter(None, map(shutil.which, candidates)), None)
        if path is None:
            return None
        command = _compilers[key] = named or [path]
    return list(command)


_compilers: dict[tuple[str, str | None], list[str]] = {}


def _list_openmp_options() -> tuple[str, ...]:
    return ("-Xclang", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)


def _list_linker_options() -> tuple[str, ...]:
    """Linker options for OpenMP.

    On macOS, functions are looked up when the kernels are loaded. On other systems, there are no options if the process
    has already loaded the OpenMP library that the kernels call, so that the kernels run in the threads of torch. Code
    from Clang and code from GCC call different OpenMP libraries, and torch may have loaded the other library.
    """
    if sys.platform == "darwin":
        return ("-undefined", "dynamic_lookup")
    called = "__kmpc_fork_call" if _is_clang(tuple(compiler())) else "GOMP_parallel"
    return () if hasattr(ctypes.CDLL(None), called) else ("-fopenmp",)


def _list_include_options(source: str) -> list[str]:
    folders = [_HEADERS]
    if '#include "special.h"' in source:  # this header includes torch's headers
        torch_headers = Path(torch.__file__).parent / "include"
        folders += [torch_headers, torch_headers / "torch" / "csrc" / "api" / "include"]
    return [f"-I{folder}" for folder in folders]


def _describe_environment() -> str:
    """Everything except the source that determines compiled code: torch, compiler, options, instructions, headers."""
    return _describe_environment_of(tuple(compiler()))


@functools.cache
def _describe_environment_of(command: tuple[str, ...]) -> str:
    headers = [path.read_text(encoding="utf-8") for path in sorted(_HEADERS.rglob("*.h"))]
    options = [*FLAGS, *_list_openmp_options(), *_list_linker_options()]
    return "\n".join([torch.__version__, *command, _read_script(command), *options, _read_macros(command), *headers])


def _read_script(command: tuple[str, ...]) -> str:
    """The text of the compiler if it is a script, whose options the macros may not show. Otherwise, an empty text."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    with open(path, "rb") as file:
        start = file.read(2)  # a compiler that is no script may have hundreds of megabytes
        return (start + file.read()).decode(errors="replace") if start == b"#!" else ""


@functools.cache
def _read_macros(command: tuple[str, ...]) -> str:
    """The compiler's predefined macros. They include the compiler's version and this machine's instruction sets."""
    query = [*command, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout


def _is_clang(command: tuple[str, ...]) -> bool:
    return "#define __clang__ " in _read_macros(command)
