"""Observes Python while a core runs: reads of attributes, and functions that start to run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

from flexsn_graph._torch_private_modules import MODULE_DEFINED_IN
from flexsn_graph.callers import warn
from flexsn_graph.reads._values import is_python_class

OnRead = Callable[[Any, str], None]


class AttributeWatch:
    """Calls `on_read(object, name)` before an attribute of a watched object is read in this thread.

    Python looks up `__getattribute__` on the class. Therefore, this method of the class is replaced until `close` is
    called. The replacement has no effect on other objects of the class or on other threads.
    """

    def __init__(self, on_read: OnRead) -> None:
        self._on_read = on_read
        self._thread = threading.get_ident()
        self._watched: dict[int, Any] = {}  # by id. The objects are kept alive, so that no other objects get their ids
        self._classes: dict[type, Any] = {}
        self._modules: list[tuple[ModuleType, type]] = []
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which reads are not reported, because the recorder itself reads attributes."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def watch(self, value: Any) -> None:
        """Starts to watch a module, or an object of a class for which `is_python_class` returns True."""
        if id(value) in self._watched:
            return
        self._watched[id(value)] = value
        cls = type(value)
        if cls is ModuleType:
            self._modules.append((value, cls))
            self._patch(_Module)
            value.__class__ = _Module
        else:
            self._patch(cls)

    def close(self) -> None:
        """Restores all classes."""
        for module, cls in self._modules:
            module.__class__ = cls
        for cls, original in self._classes.items():
            if original is None:
                type.__delattr__(cls, "__getattribute__")
            else:
                type.__setattr__(cls, "__getattribute__", original)
        self._modules.clear()
        self._classes.clear()

    def own_getattribute(self, cls: type) -> Any:
        """The `__getattribute__` that a user's class defines, or `None`."""
        for kind in cls.__mro__:
            result = self._classes[kind] if kind in self._classes else kind.__dict__.get("__getattribute__")
            if result is not None:
                return result if is_python_class(kind) else None
        return None

    def _patch(self, cls: type) -> None:
        if cls in self._classes:
            return
        original: Any = cls.__getattribute__
        thread, watched, on_read, ident = self._thread, self._watched, self._on_read, threading.get_ident

        def __getattribute__(owner: Any, name: str) -> Any:
            if (
                id(owner) in watched
                and ident() == thread
                and not self._is_paused
                # `on_read` has already recorded the entries that `nn.Module` reads from `__dict__`.
                and (name != "__dict__" or sys._getframe(1).f_globals.get("__name__") != MODULE_DEFINED_IN)
            ):
                with self.paused():
                    on_read(owner, name)
            return original(owner, name)

        self._classes[cls] = cls.__dict__.get("__getattribute__")
        type.__setattr__(cls, "__getattribute__", __getattribute__)


class _Module(ModuleType):
    pass


OnCall = Callable[[FrameType], None]
OnBuiltin = Callable[[FrameType, Any], None]
Profile = Callable[[FrameType, str, Any], None]
_active_profiles: list[Profile] = []


@contextmanager
def calls_watched(on_call: OnCall, on_builtin: OnBuiltin, observed: Container[CodeType]) -> Iterator[None]:
    """Calls `on_call(frame)` when a Python function starts to run in this thread.

    Args:
        on_builtin: called with a frame and a builtin function when the frame calls the function. Only frames whose code
            is in `observed` are observed.
    """

    def profile(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            on_call(frame)
        elif event == "c_call" and frame.f_code in observed:
            on_builtin(frame, function)

    before: Any = sys.getprofile()
    is_native = before is not None and not callable(before)  # Python code cannot install a native profiler again
    can_pause = is_native and hasattr(before, "disable") and hasattr(before, "enable")  # cProfile
    if can_pause:
        before.disable()
    elif is_native:
        _warn_of_displaced(before)
    _active_profiles.append(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        _active_profiles.pop()
        sys.setprofile(None if is_native else before)
        if can_pause:
            before.enable()


def _warn_of_displaced(profiler: object) -> None:
    """Warns that a profiler no longer records Python calls."""
    warn(
        f"a step is traced while {type(profiler).__name__} records Python calls (torch.profiler with "
        "with_stack=True), but only the trace or the profiler can observe calls. From here on, the profiler "
        "records operations without stacks. Call the network once before you profile it, so that the profiled calls "
        "need no trace."
    )


def suspend() -> Profile | None:
    """Pauses the observation of calls during code whose calls are irrelevant. Pass the result to `resume`."""
    profile = sys.getprofile()
    if profile is None or not _active_profiles or profile is not _active_profiles[-1]:
        return None
    sys.setprofile(None)
    return _active_profiles[-1]


def resume(profile: Profile | None) -> None:
    """Continues the observation of calls after `suspend`, which has returned `profile`."""
    if profile is not None:
        sys.setprofile(profile)
