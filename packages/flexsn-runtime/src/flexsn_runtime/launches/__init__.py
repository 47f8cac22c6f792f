"""Launches of kernels, with one class for each way to launch a kernel."""

from __future__ import annotations
