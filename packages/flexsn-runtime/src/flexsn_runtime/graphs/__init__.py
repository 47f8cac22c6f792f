"""Scans inside compiler graphs: steps whose sizes may be symbols, and the launches of their kernels."""

from __future__ import annotations
