"""A module of constants that tests change, as research code often has one."""

from __future__ import annotations

from typing import Any

TAU: Any = 0.25
TABLE: dict[str, Any] = {"tau": 0.25}


def charge(x: Any, value: Any) -> Any:
    """Computes the charge from the input of the core and the value that the core reads."""
    return value(x) if callable(value) else x * value
