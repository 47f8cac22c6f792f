"""The compiled launcher: scans with gradients, launched and joined to autograd without Python."""

from __future__ import annotations

from flexsn_runtime.native._launcher import LauncherChoice, compiled_launcher, launcher_in_words
from flexsn_runtime.native._scan import LastLaunch, NativeScan

__all__ = ["LastLaunch", "LauncherChoice", "NativeScan", "compiled_launcher", "launcher_in_words"]
