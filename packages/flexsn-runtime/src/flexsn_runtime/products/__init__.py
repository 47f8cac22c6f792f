"""Matrix products with spikes: float32 results at the speed of tensor cores."""

from __future__ import annotations

from flexsn_runtime.products._linear import MOST_PARTS, spike_linear
from flexsn_runtime.products._pays import why_not_worth

__all__ = ["MOST_PARTS", "spike_linear", "why_not_worth"]
