"""`scan`: pytrees around the operator."""

from __future__ import annotations
