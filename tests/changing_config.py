"""A module of constants, as researchers have one, that tests change."""

from __future__ import annotations

from typing import Any

TAU: Any = 0.25
TABLE: dict[str, Any] = {"tau": 0.25}


def charge(x: Any, value: Any) -> Any:
    """The charge that the core computes from its input and the value that it read."""
    return value(x) if callable(value) else x * value
