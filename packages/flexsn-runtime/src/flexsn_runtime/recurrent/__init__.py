"""Scans of steps with matrix products."""

from __future__ import annotations
