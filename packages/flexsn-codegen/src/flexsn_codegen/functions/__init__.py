"""`pointwise`: functions without time, traced, launched, differentiated, and recorded by compilers."""

from __future__ import annotations
