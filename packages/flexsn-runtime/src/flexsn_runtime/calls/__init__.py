"""A call of one kind as data, and what executes it in Python."""

from __future__ import annotations
