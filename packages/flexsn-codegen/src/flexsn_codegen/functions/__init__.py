"""`pointwise`: the traces, launches, derivatives and compiler operators of functions without a time dimension."""

from __future__ import annotations
