"""Matrix products with spikes: float32 results at the speed of tensor cores."""

from __future__ import annotations

from flexsn_runtime.products._launch import compile_real_product, real_product, split
from flexsn_runtime.products._linear import MOST_PARTS, Linked, Links, linked_linear, product_with_spikes, spike_linear
from flexsn_runtime.products._pays import fewest_multiplications, why_slow_product
from flexsn_runtime.products._repeated_products import RepeatedProducts

__all__ = [
    "MOST_PARTS",
    "Linked",
    "Links",
    "RepeatedProducts",
    "compile_real_product",
    "fewest_multiplications",
    "linked_linear",
    "product_with_spikes",
    "real_product",
    "spike_linear",
    "split",
    "why_slow_product",
]
