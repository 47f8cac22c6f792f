"""Splits a step with matrix products into stages and products."""

from __future__ import annotations

from flexsn_graph.staging._absent import absent_at_first
from flexsn_graph.staging._filters import without_carried_filters
from flexsn_graph.staging._keys import Keys
from flexsn_graph.staging._sizes import is_of_any_batch, resized
from flexsn_graph.staging._staging import has_products, stage

__all__ = ["Keys", "absent_at_first", "has_products", "is_of_any_batch", "resized", "stage", "without_carried_filters"]
