"""Scans inside compiler graphs: sizes that may be symbols, and launches."""

from __future__ import annotations
