"""Python modules in C++ that use torch. They are compiled at first use and stored in the cache folder."""

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

from flexsn_codegen.errors import CompilationError
from flexsn_codegen.source._cache import cache_folder, find_kept, keep
from flexsn_codegen.targets.cpp._compiler import compiler, in_a_folder, run_compiler

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared")
_TORCH = Path(torch.__file__).parent


class Extension:
    """A Python module in C++.

    Args:
        name: name of the module. The source defines a module of this name.
        source: source of the module in C++, which includes torch's headers.
    """

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def kept(self) -> Path | None:
        """The module's file in the cache folder, for this Python, torch and system. `None` if the file does not exist.

        Raises:
            CacheFolderError: see `flexsn_codegen.cache_folder`.
        """
        path = find_kept(self._make_file_name())
        return path if path is not None and _is_complete(path) else None

    def build(self) -> Path:
        """The module's file. If it does not exist, a single process compiles it, which takes half a minute.

        Raises:
            CompilerMissingError: there is no compiler.
            CompilationError: the compiler rejects the source. Python's headers may be missing.
            CacheFolderError: see `flexsn_codegen.cache_folder`.
        """
        with (cache_folder() / f"{self._name}.lock").open("w") as lock:
            with contextlib.suppress(OSError):  # without file locks, several processes may compile the module
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return self.kept() or keep(self._make_file_name(), _seal(self._compile()))[0]
            finally:
                # Closing the file does not unlock it if a forked child has the file open, too.
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def load(self, path: Path) -> ModuleType:
        """Loads the module from its file.

        Raises:
            ImportError: the file is not a module, or cannot be loaded from its folder.
        """
        loader = importlib.machinery.ExtensionFileLoader(self._name, str(path))
        spec = importlib.util.spec_from_file_location(self._name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def _make_file_name(self) -> str:
        system = (platform.machine(), *platform.libc_ver())
        made_from = (torch.__version__, sys.version, *system, *_FLAGS, self._source)
        digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:32]
        return f"{self._name}_{digest}.so"

    def _compile(self) -> bytes:
        headers = _TORCH / "include"
        folders = (headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
        libraries = ("torch_python", "torch_cpu", "torch", "c10")
        with in_a_folder() as folder:
            text, library = folder / "module.cpp", folder / "module.so"
            text.write_text(self._source, encoding="utf-8")
            command = [*compiler(), *_FLAGS, *(f"-I{path}" for path in folders), str(text), "-o", str(library)]
            command += [f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in libraries), f"-Wl,-rpath,{_TORCH / 'lib'}"]
            run_compiler(command, f"the module {self._name}")
            if not library.is_file() or not library.stat().st_size:
                raise CompilationError(f"{compiler()[0]} reports success for {self._name}, but wrote no file.")
            return library.read_bytes()


_SEAL_SIZE = hashlib.sha256().digest_size


def _seal(content: bytes) -> bytes:
    """The content, followed by its hash. Loaders ignore the hash, which detects incomplete files."""
    return content + hashlib.sha256(content).digest()


def _is_complete(path: Path) -> bool:
    content = path.read_bytes()
    return _seal(content[:-_SEAL_SIZE]) == content
