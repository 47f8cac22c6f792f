"""A step function that is specialized on demand: the path of a call in eager mode."""

from __future__ import annotations
