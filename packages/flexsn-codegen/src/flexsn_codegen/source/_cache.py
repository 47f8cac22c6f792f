"""Generated sources on disk, and the modules that are loaded from them.

Triton reads a kernel's source from a file, so each source is written to a folder of the user. The file's name contains
the hash of the source. Therefore, equal sources share one file, and an existing file never changes.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import importlib
import importlib.util
import os
import pwd
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flexsn_codegen.errors import CacheFolderError, KernelNameError, TritonMissingError
from flexsn_codegen.source._source import identifier

_VARIABLE = "FLEXSN_CACHE_DIR"

# The largest number of attempts to load a source that another program deletes each time before it is read.
_MOST_TRIES = 100

# The definitions of each loaded source. The most recently used source comes last. A source can be unloaded while its
# functions are in use, because they do not need their module.
_loaded: dict[Path, dict[str, Any]] = {}
_MOST_LOADED = 1024
_lock = threading.Lock()


def _unlock_in_child() -> None:
    """Replaces the lock in a forked child process, which does not contain the thread that may hold the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)


def compile_triton_code_str(
    triton_code: str,
    kernel_name: str,
    verbose: bool = False,
    name_space: dict[str, Any] | None = None,
) -> Any:
    """Turns the source of a module into the kernel that the module defines.

    The source is stored in a folder of the user (`FLEXSN_CACHE_DIR`, else `~/.cache/flexsn`, else a folder for
    this user in the temporary folder). Each source is loaded once per process. Several threads and processes may call
    `compile_triton_code_str` at the same time.

    Args:
        triton_code: source of a module that defines a `@triton.jit` function `kernel_name`.
        verbose: prints the path of the source, and whether it was written or reused.
        name_space: globals for the module. The module's definitions are added to this dict. If a dict is passed, the
            module is loaded again on each call.

    Returns:
        The `triton.JITFunction` (under Triton's interpreter, its replacement).

    Raises:
        KernelNameError: the source does not define `kernel_name`, even if `name_space` contains this name.
        CacheFolderError: the folder belongs to another user, other users can write to it or to a folder that contains
            it, this user cannot write to it, or another program deletes the source before it is read.
        TritonMissingError: Triton is not installed.
    """
    _require_triton()
    path, written = _write(triton_code, kernel_name)
    if verbose:
        print(f"flexsn_codegen: {'wrote' if written else 'reused'} {path}")
    with _lock:
        defined = None if name_space is not None else _loaded.pop(path, None)
        for _ in range(_MOST_TRIES):
            if defined is not None:
                break
            # Excludes `kernel_name`, because an object of this name in `name_space` must not be returned as the kernel.
            initial_globals = {k: v for k, v in (name_space or {}).items() if k != kernel_name}
            try:
                defined = _load(path, initial_globals)
            except OSError:
                if path.exists():
                    raise
                path, _ = _write(triton_code, kernel_name)  # another process deleted the file before it was read
        if defined is None:
            raise CacheFolderError(f"{path} was deleted after each write: another program empties {path.parent}.")
        if name_space is None:
            _loaded[path] = defined
            while len(_loaded) > _MOST_LOADED:
                _unload(next(iter(_loaded)))
    if kernel_name not in defined:
        raise KernelNameError(f"the source defines no {kernel_name!r}; it defines {sorted(defined)}.")
    if name_space is not None:
        name_space.update(defined)
    return defined[kernel_name]


def cache_folder() -> Path:
    """The folder for generated sources, which is private to this user. It is created if necessary.

    Raises:
        CacheFolderError: the folder belongs to another user, other users can write to it or to a folder that contains
            it, or no folder can be created.
    """
    explicit = os.environ.get(_VARIABLE)
    if explicit:
        try:
            return _make_private_folder(Path(explicit).absolute())
        except OSError as error:
            raise _make_error(Path(explicit), error) from error
    try:
        return _make_private_folder(Path.home() / ".cache" / "flexsn")
    except (OSError, RuntimeError) as error:
        if isinstance(error, CacheFolderError):
            raise
        # The home folder is read-only, full or absent, so this user's folder in the temporary folder is used.
        return _make_temporary_folder()


def _get_temporary_path() -> Path:
    return Path(tempfile.gettempdir()).absolute() / f"flexsn-{os.getuid()}"


def _make_temporary_folder() -> Path:
    path = _get_temporary_path()
    try:
        return _make_private_folder(path)
    except OSError as error:
        raise _make_error(path, error) from error


def _make_error(path: Path, error: OSError) -> CacheFolderError:
    return CacheFolderError(
        f"generated kernels cannot be stored in {path}: {error.strerror or error}. Free disk space, make the folder "
        f"writable for you, or set {_VARIABLE} to another folder."
    )


def prune_cache(days: float) -> int:
    """Deletes the files that were last written or loaded more than `days` days ago, and returns their number."""
    limit = time.time() - days * 86400
    deleted = 0
    for path in cache_folder().iterdir():
        with contextlib.suppress(OSError):  # another process may delete the file at the same time
            # A temporary file belongs to a write in progress, unless it is more than a day old.
            latest = min(limit, time.time() - 86400) if path.suffix == ".tmp" else limit
            if path.is_file() and path.stat().st_mtime < latest:
                path.unlink()
                deleted += 1
    return deleted


def find_kept(name: str) -> Path | None:
    """Returns the file that `keep` has written under this name, or `None` if no such file exists.

    The content is not compared, so the name has to contain a hash of everything that determines the content.
    """
    folders = [cache_folder()]
    if not os.environ.get(_VARIABLE) and _get_temporary_path().is_dir():
        folders.append(_make_temporary_folder())
    for folder in folders:
        path = folder / name
        if not path.is_symlink() and path.is_file():
            with contextlib.suppress(OSError):
                os.utime(path)  # marks the file as in use, so that it is not pruned
            return path
    return None


def keep(name: str, content: bytes) -> tuple[Path, bool]:
    """Writes a file to the cache folder, unless the file already exists with this content.

    If the cache folder is not writable, the file is written to this user's folder in the temporary folder, unless
    `FLEXSN_CACHE_DIR` is set.

    Returns:
        The path of the file, and True if this call has written it.
    """
    path = cache_folder() / name
    if _has_content(path, content):
        return path, False
    try:
        write_private(path, content)
    except OSError as error:
        if os.environ.get(_VARIABLE):
            raise _make_error(path, error) from error
        # The disk of the home folder may be full. The temporary folder may be on another disk.
        fallback = _make_temporary_folder() / name
        if _has_content(fallback, content):
            return fallback, False
        try:
            write_private(fallback, content)
        except OSError as second_error:
            raise _make_error(path, error) from second_error
        return fallback, True
    return path, True


def _make_private_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CacheFolderError(
            f"{path} is a link, belongs to another user or can be written by others, so the kernels in it "
            "could be those of another user. Remove it, make it private (chmod 700), or set FLEXSN_CACHE_DIR."
        )
    for parent in path.resolve().parents:
        # Other users with write access to a parent folder could replace this folder. If the parent has the sticky bit,
        # like /tmp, they cannot do this, because only owners can then move or delete files.
        status = parent.stat()
        if not status.st_mode & stat.S_ISVTX and _can_others_write(status):
            raise CacheFolderError(
                f"{path} is private, but others can write to {parent}, which contains it, and could replace it by a "
                f"folder of their own. Make {parent} private (chmod go-w {parent}), or name another folder in "
                f"{_VARIABLE}."
            )
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def _can_others_write(status: os.stat_result) -> bool:
    """True if users other than this user and the administrator may write."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid not in (0, _find_private_group())


def _find_private_group() -> int | None:
    """This user's primary group if it has the user's name: such a group usually has no other members. Else `None`."""
    user = pwd.getpwuid(os.getuid()) if _has_name(os.getuid()) else None
    with contextlib.suppress(KeyError):
        if user is not None and grp.getgrgid(user.pw_gid).gr_name == user.pw_name:
            return user.pw_gid
    return None


def _has_name(number: int) -> bool:
    try:
        pwd.getpwuid(number)
    except KeyError:  # for example, in a container that was started with an arbitrary user id
        return False
    return True


def _write(code: str, kernel_name: str) -> tuple[Path, bool]:
    digest = hashlib.sha256(code.encode()).hexdigest()[:32]
    return keep(f"{identifier(kernel_name)}_{digest}.py", code.encode())


def _has_content(path: Path, content: bytes) -> bool:
    """True if the file exists and has this content."""
    try:
        result = not path.is_symlink() and path.is_file() and path.read_bytes() == content
    except OSError:
        return False
    if result:
        with contextlib.suppress(OSError):
            os.utime(path)  # marks the file as in use, so that it is not pruned
    return result


def write_private(path: Path, text: str | bytes) -> None:
    """Writes a file that is private to this user, for example in `cache_folder()`.

    The file is written under a temporary name and then renamed. Therefore, a process that opens the file at the same
    time finds the complete file or no file, even if the disk becomes full.

    Raises:
        OSError: the file cannot be written. The temporary file is then deleted.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        os.chmod(temporary, 0o600)
        try:
            os.replace(temporary, path)
        except IsADirectoryError:
            path.rmdir()  # raises an error and changes nothing if the folder is not empty
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unload(path: Path) -> None:
    del _loaded[path]
    sys.modules.pop(_get_module_name(path), None)


def _get_module_name(path: Path) -> str:
    return f"flexsn_codegen._generated.{path.stem}"


def _load(path: Path, initial_globals: dict[str, Any]) -> dict[str, Any]:
    """Runs the source with `initial_globals`. Returns the globals that the source has defined or changed."""
    name = _get_module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module_names = {*vars(module), "__builtins__", "__annotations__"}
    vars(module).update(initial_globals)
    # Triton and inspect look up the module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return {
        k: v
        for k, v in vars(module).items()
        if k not in module_names and (k not in initial_globals or initial_globals[k] is not v)
    }


def _require_triton() -> None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise TritonMissingError(
            "flexsn_codegen compiles with Triton, which is not installed. Run: pip install triton"
        ) from error
