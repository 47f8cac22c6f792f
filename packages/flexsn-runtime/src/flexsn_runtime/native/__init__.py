"""The compiled launcher: plans executed, and scans with gradients joined to autograd, without Python."""

from __future__ import annotations

from flexsn_runtime.native._launcher import LauncherChoice, compiled_launcher, launcher_in_words, may_launch
from flexsn_runtime.native._product import NativeProduct, ProductOwner
from flexsn_runtime.native._scan import LastLaunch, NativeCall, NativeScan, told_forward

__all__ = [
    "LastLaunch",
    "LauncherChoice",
    "NativeCall",
    "NativeProduct",
    "NativeScan",
    "ProductOwner",
    "compiled_launcher",
    "launcher_in_words",
    "may_launch",
    "told_forward",
]
