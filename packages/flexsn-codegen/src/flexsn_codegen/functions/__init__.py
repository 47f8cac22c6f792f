"""`pointwise`: functions without time, with their traces, launches, derivatives, and operators for compilers."""

from __future__ import annotations
