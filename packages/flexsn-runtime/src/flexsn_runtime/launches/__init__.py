"""Launches of kernels of each language."""

from __future__ import annotations
