"""A step function that is specialized when it is called: the path of a call in eager mode."""

from __future__ import annotations
