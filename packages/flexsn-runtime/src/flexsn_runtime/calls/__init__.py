"""Plans and recordings: calls with tensors of one layout, represented as data, and their execution in Python."""

from __future__ import annotations
