"""Generated sources on disk, and the modules made of them.

Triton reads a kernel's source from its file, so each source is written to a per-user folder, under a name
that holds its hash: the same source is the same file, and a file is never changed once it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flexsn_codegen._core import identifier
from flexsn_codegen.errors import CacheFolderError, KernelNameError, TritonMissingError

# What each source defines.
_loaded: dict[Path, dict[str, Any]] = {}
_lock = threading.Lock()


def compile_triton_code_str(
    triton_code: str,
    kernel_name: str,
    verbose: bool = False,
    name_space: dict[str, Any] | None = None,
) -> Any:
    """Turns the source of a module into the kernel that it defines.

    The source is kept in a per-user folder (`FLEXSN_CACHE_DIR`, else `~/.cache/flexsn`, else a folder for
    this user in the temporary folder); the same source is loaded once per process. Safe under threads and
    processes.

    Args:
        triton_code: source of a module that defines a `@triton.jit` function `kernel_name`.
        verbose: prints whether the source was written or reused, and where.
        name_space: globals for the module; updated afterwards with what the module defines. With it, the
            module is loaded anew on each call.

    Returns:
        The `triton.JITFunction` (under Triton's interpreter, what takes its place).

    Raises:
        KernelNameError: the source defines no `kernel_name`; one in `name_space` does not count.
        CacheFolderError: the folder belongs to or can be written by others.
        TritonMissingError: triton is not installed.
    """
    _require_triton()
    path, written = _write(triton_code, kernel_name)
    if verbose:
        print(f"flexsn_codegen: {'wrote' if written else 'reused'} {path}")
    with _lock:
        defined = None if name_space is not None else _loaded.get(path)
        if defined is None:
            # Without the name that is looked for: an older thing of this name must not pass for the kernel.
            given = {k: v for k, v in (name_space or {}).items() if k != kernel_name}
            defined = _load(path, given)
            if name_space is None:
                _loaded[path] = defined
    if kernel_name not in defined:
        raise KernelNameError(f"the source defines no {kernel_name!r}; it defines {sorted(defined)}.")
    if name_space is not None:
        name_space.update(defined)
    return defined[kernel_name]


def cache_folder() -> Path:
    """The folder for generated sources, made if need be; private to this user."""
    explicit = os.environ.get("FLEXSN_CACHE_DIR")
    if explicit:
        return _private_folder(Path(explicit))
    try:
        return _private_folder(Path.home() / ".cache" / "flexsn")
    except OSError:
        # A read-only home: a folder of this user's own in the temporary folder.
        return _private_folder(Path(tempfile.gettempdir()) / f"flexsn-{os.getuid()}")


def prune_cache(days: float) -> int:
    """Deletes the sources that were last written or loaded more than `days` days ago; returns how many."""
    limit = time.time() - days * 86400
    old = [path for path in cache_folder().iterdir() if path.is_file() and path.stat().st_mtime < limit]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def _private_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CacheFolderError(
            f"{path} is a link, belongs to another user or can be written by others, so the kernels in it "
            "could be somebody else's. Remove it, make it private (chmod 700), or set FLEXSN_CACHE_DIR."
        )
    if not os.access(path, os.W_OK):
        raise PermissionError(path)
    return path


def _write(code: str, kernel_name: str) -> tuple[Path, bool]:
    digest = hashlib.sha256(code.encode()).hexdigest()[:32]
    path = cache_folder() / f"{identifier(kernel_name)}_{digest}.py"
    if not path.is_symlink() and path.is_file() and path.read_text(encoding="utf-8") == code:
        with contextlib.suppress(OSError):
            os.utime(path)  # in use: not to be pruned
        return path, False
    write_private(path, code)
    return path, True


def write_private(path: Path, text: str) -> None:
    """Writes a file that is this user's alone, in `cache_folder()` say.

    It is written aside and moved: a process that reads or writes it at the same time sees all of a text or nothing.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o600)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Runs the source; returns what it defines, or had been given and changed."""
    name = f"flexsn_codegen._generated.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    own = {*vars(module), "__builtins__", "__annotations__"}
    vars(module).update(given)
    # Triton and inspect look the module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return {k: v for k, v in vars(module).items() if k not in own and (k not in given or given[k] is not v)}


def _require_triton() -> None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise TritonMissingError(
            "flexsn_codegen compiles with Triton, which is not installed. Run: pip install triton"
        ) from error
