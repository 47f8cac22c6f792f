"""Launches of kernels, by the language of the kernel."""

from __future__ import annotations
