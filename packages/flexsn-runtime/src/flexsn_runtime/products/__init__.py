"""Matrix products with spikes: float32 results at the speed of tensor cores."""

from __future__ import annotations

from flexsn_runtime.products._linear import (
    MOST_PARTS,
    Linked,
    Links,
    compilations_with_spikes,
    linked_linear,
    product_with_spikes,
    spike_linear,
)
from flexsn_runtime.products._pays import fewest_multiplications, why_slow_product
from flexsn_runtime.products._repeated_products import RepeatedProducts

__all__ = [
    "MOST_PARTS",
    "Linked",
    "Links",
    "RepeatedProducts",
    "compilations_with_spikes",
    "fewest_multiplications",
    "linked_linear",
    "product_with_spikes",
    "spike_linear",
    "why_slow_product",
]
