"""Takes a step with matrix products apart."""

from __future__ import annotations

from flexsn_graph.staging._keys import Keys
from flexsn_graph.staging._staging import has_products, stage

__all__ = ["Keys", "has_products", "stage"]
