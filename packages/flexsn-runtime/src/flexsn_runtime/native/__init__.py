"""The compiled launcher executes recorded calls and connects them to autograd without Python."""

from __future__ import annotations

from flexsn_runtime.native._function import RepeatedFunction
from flexsn_runtime.native._launcher import LauncherChoice, compiled_launcher, launcher_in_words, may_launch
from flexsn_runtime.native._program import can_be_native
from flexsn_runtime.native._saving import saving_hooks
from flexsn_runtime.native._scan import Again, NativeCall, NativeScan, Owner, weakly

__all__ = [
    "Again",
    "LauncherChoice",
    "NativeCall",
    "NativeScan",
    "Owner",
    "RepeatedFunction",
    "can_be_native",
    "compiled_launcher",
    "launcher_in_words",
    "may_launch",
    "saving_hooks",
    "weakly",
]
