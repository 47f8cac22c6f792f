"""Constants in a separate module, as in much research code. Tests change these constants."""

from __future__ import annotations

from typing import Any

TAU: Any = 0.25
TABLE: dict[str, Any] = {"tau": 0.25}


def charge(x: Any, value: Any) -> Any:
    """Computes the charge from the input of a core and the value that this core reads."""
    return value(x) if callable(value) else x * value
