"""Decides when to compile the compiled launcher, and loads it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import torch

from flexsn_codegen.targets.cpp import Extension
from flexsn_runtime.errors import LauncherError

LauncherChoice = Literal["auto", "compiled", "python"]

_VARIABLE = "FLEXSN_LAUNCHER"
_NAME = "flexsn_launcher"
# After this number of calls of one kind, the calls are assumed to be a training loop, for which half a minute of
# compilation pays off.
_CALLS_OF_A_LOOP = 64


class _Launcher:
    """The compiled module, and the state of its compilation.

    Attributes:
        error: error of the compilation or the import. After an error, this process tries again only if one of the
            environment variables `_SETTINGS` has changed, because the error message may advise to change a variable.
        building: thread that compiles the module; `None` if no thread compiles it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extension: Extension | None = None
        self.module: ModuleType | None = None
        self.error: Exception | None = None
        self._settings: tuple[str | None, ...] = ()  # values of `_SETTINGS` when `error` was raised
        self.building: threading.Thread | None = None

    def get(self, choice: LauncherChoice, calls: int) -> ModuleType | None:
        """Returns the module; `None` if it is not loaded. Loads or compiles it as described for `compiled_launcher`."""
        if self.module is None and choice == "compiled" and (building := self.building) is not None:
            building.join()
        self.forget_outdated_error()
        if self.module is None and self.error is None and self.building is None:
            with self._lock:
                if self.module is None and self.error is None and self.building is None:
                    try:
                        self._begin(choice, calls)
                    except Exception as error:
                        self._fail(error)
        if self.error is not None and choice == "compiled":
            raise self.error
        return self.module

    def forget_outdated_error(self) -> None:
        """Removes the error if one of the variables `_SETTINGS` has changed since the error was raised."""
        if self.error is not None and self._settings != _read_settings():
            self.error = None

    def _fail(self, error: Exception) -> None:
        self.error, self._settings = error, _read_settings()

    def _begin(self, choice: LauncherChoice, calls: int) -> None:
        if self._extension is None:
            source = Path(__file__).with_name("launcher.cpp").read_text(encoding="utf-8")
            self._extension = Extension(_NAME, source)
        path = self._extension.kept()
        if path is not None:
            self._load(path)
        elif choice == "compiled":
            self._load(self._extension.build())
        elif calls >= _CALLS_OF_A_LOOP:
            self.building = threading.Thread(target=self._build, name=_NAME, daemon=True)
            self.building.start()

    def _build(self) -> None:
        """Compiles and loads the module in a separate thread, which waits for the compiler."""
        assert self._extension is not None
        try:
            self._load(self._extension.build())
        except Exception as error:
            self._fail(error)
        finally:
            self.building = None

    def _load(self, path: Path) -> None:
        assert self._extension is not None
        module = self._extension.load(path)
        if torch.cuda.is_available() and torch.version.hip is None:
            driver = "libcuda.so.1"
            launches = _find_address(driver, "cuLaunchKernel"), _find_address(driver, "cuLaunchCooperativeKernel")
            module.on_gpu(*launches, _find_address(*_CURRENT_STREAM))
        self.module = module


_CURRENT_STREAM = (str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream")
_launcher = _Launcher()
# Environment variables on which a compilation depends.
_SETTINGS = ("CXX", "PATH", "FLEXSN_CACHE_DIR", "TMPDIR")


def _read_settings() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, _SETTINGS))


def _find_address(library: str, name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0


if hasattr(os, "register_at_fork"):

    def _reset_after_fork() -> None:
        """Resets the launcher in the child of a fork, because the thread that compiles does not exist in the child."""
        global _launcher
        if _launcher.module is None:
            _launcher = _Launcher()

    os.register_at_fork(after_in_child=_reset_after_fork)


def launcher_choice() -> LauncherChoice:
    """Returns the value of the environment variable `FLEXSN_LAUNCHER`, which is `"auto"` by default.

    Raises:
        LauncherError: the variable has another value.
    """
    choice = os.environ.get(_VARIABLE, "auto")
    if choice not in get_args(LauncherChoice):
        raise LauncherError(f"{_VARIABLE} is {choice!r}; it may be {', '.join(get_args(LauncherChoice))}.")
    return choice  # type: ignore[return-value]


def compiled_launcher(device: torch.device, calls: int) -> ModuleType | None:
    """Returns the module `flexsn_launcher`; `None` if it is not loaded, or launches no calls on this device.

    If `FLEXSN_LAUNCHER` is `"auto"`, the module launches calls on GPUs only. If the cache contains the compiled module,
    this function loads it. Otherwise, with `"auto"`, the module is compiled in the background after many calls, and the
    result is `None` until the module is loaded. With `"compiled"`, the module is compiled immediately.

    Args:
        device: device of a scan's tensors.
        calls: number of calls of one kind so far.

    Raises:
        LauncherError: see `launcher_choice`.
        CompilerMissingError, CompilationError, CacheFolderError, ImportError: the variable is
            `"compiled"`, and the module cannot be compiled or loaded.
    """
    return _launcher.get(launcher_choice(), calls) if may_launch(device) else None


def loaded_launcher() -> ModuleType | None:
    """Returns the module if it is already loaded and `FLEXSN_LAUNCHER` is not `python`.

    Raises:
        LauncherError: see `launcher_choice`.
    """
    return None if _launcher.module is None or launcher_choice() == "python" else _launcher.module


def may_launch(device: torch.device) -> bool:
    """True if `compiled_launcher` can return the module for this device, now or in a later call.

    Raises:
        LauncherError: see `launcher_choice`.
    """
    choice = launcher_choice()
    return (
        choice != "python"
        and (choice == "compiled" or device.type == "cuda")
        and _find_unmet_requirement(device) is None
    )


def _find_unmet_requirement(device: torch.device) -> str | None:
    """Returns a requirement of the module that this machine or this Python can never meet; otherwise `None`."""
    if sys.platform != "linux":
        return "for Linux"
    if device.type == "cuda" and torch.version.hip is not None:
        return "for NVIDIA's GPUs and the CPU"
    # Loading the module would switch the global interpreter lock on again.
    is_locked: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return None if is_locked() else "for a Python with its global lock"


def launcher_in_words(device: torch.device) -> str:
    """Returns a text that names the launcher that runs training steps on a device, and the reason."""
    choice = launcher_choice()
    if choice == "python":
        return f"Python, as {_VARIABLE} requests"
    requirement = _find_unmet_requirement(device)
    if requirement is not None:
        return f"Python; the compiled launcher is {requirement}"
    if choice == "auto" and device.type != "cuda":
        return f"Python; {_VARIABLE}=compiled enables the compiled launcher on the CPU, too"
    if _launcher.module is not None:
        return "the compiled launcher"
    _launcher.forget_outdated_error()
    if _launcher.error is not None:
        return f"Python; the compiled launcher is unavailable: {_launcher.error}"
    if _launcher.building is not None:
        return "Python, while the compiled launcher is compiled"
    if choice == "compiled":
        return "Python; the compiled launcher is compiled at the first backward"
    return f"Python; the compiled launcher is compiled after {_CALLS_OF_A_LOOP} calls of one kind, once per machine"
