"""Runs a core on fake tensors, records it, captures tensors, and rejects unsupported code."""

from __future__ import annotations
