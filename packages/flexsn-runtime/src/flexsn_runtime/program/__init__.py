"""The path of a call in eager mode, from a step function to its specializations and their launches."""

from __future__ import annotations
