"""Steps with matrix products, over time."""

from __future__ import annotations
