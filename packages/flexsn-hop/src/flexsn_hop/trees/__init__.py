"""`scan`, which applies the operator to pytrees."""

from __future__ import annotations
