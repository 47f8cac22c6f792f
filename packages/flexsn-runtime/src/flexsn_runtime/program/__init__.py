"""A step function that is specialised on demand: the path of a call in eager mode."""

from __future__ import annotations
