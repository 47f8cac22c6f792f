"""Modules for Python in C++ that use torch, compiled where they are used and kept in the cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import platform
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from flexsn_codegen._cache import cache_folder, keep, kept
from flexsn_codegen.targets.cpp._compiler import compiler, in_a_folder, run_compiler

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared")
_TORCH = Path(torch.__file__).parent


class Extension:
    """A module, which may be compiled already.

    Args:
        name: of the module, as its source defines it.
        source: in C++, with torch's headers.
    """

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def kept(self) -> Path | None:
        """Its file, if it was compiled before for this Python, this torch and a system like this one.

        Raises:
            CacheFolderError: see `flexsn_codegen.cache_folder`.
        """
        return kept(self._file())

    def build(self) -> Path:
        """Its file, compiled unless it is there, which takes half a minute. Of several processes, one compiles.

        Raises:
            CompilerMissingError: there is no compiler.
            CompilationError: it refuses the source; Python's headers may be missing.
            CacheFolderError: see `flexsn_codegen.cache_folder`.
        """
        with (cache_folder() / f"{self._name}.lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: more than one may compile
                fcntl.flock(lock, fcntl.LOCK_EX)
            return self.kept() or keep(self._file(), self._compiled())[0]

    def load(self, path: Path) -> ModuleType:
        """The module.

        Raises:
            ImportError: the file is none, or cannot be loaded from that folder.
        """
        loader = importlib.machinery.ExtensionFileLoader(self._name, str(path))
        spec = importlib.util.spec_from_file_location(self._name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def _file(self) -> str:
        system = (platform.machine(), *platform.libc_ver())
        made_from = (torch.__version__, sys.version, *system, *_FLAGS, self._source)
        digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:32]
        return f"{self._name}_{digest}.so"

    def _compiled(self) -> bytes:
        headers = _TORCH / "include"
        folders = (headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
        libraries = ("torch_python", "torch_cpu", "torch", "c10")
        with in_a_folder() as folder:
            text, library = folder / "module.cpp", folder / "module.so"
            text.write_text(self._source, encoding="utf-8")
            command = [*compiler(), *_FLAGS, *(f"-I{path}" for path in folders), str(text), "-o", str(library)]
            command += [f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in libraries), f"-Wl,-rpath,{_TORCH / 'lib'}"]
            run_compiler(command, f"the module {self._name}")
            return library.read_bytes()
