"""`pointwise`: functions without a time dimension, with their traces, launches, derivatives, and compiler operators."""

from __future__ import annotations
