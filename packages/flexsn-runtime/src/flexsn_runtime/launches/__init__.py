"""One launch of one kernel, by what the kernel is written in."""

from __future__ import annotations
