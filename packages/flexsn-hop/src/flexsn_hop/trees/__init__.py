"""`scan`: the operator on pytrees."""

from __future__ import annotations
