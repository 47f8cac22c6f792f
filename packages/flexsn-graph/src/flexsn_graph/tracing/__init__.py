"""Runs a core on fake tensors, records it, finds captured tensors, and refuses unsupported code."""

from __future__ import annotations
