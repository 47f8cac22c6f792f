"""A call of one layout as data, and its execution in Python."""

from __future__ import annotations
