"""Exact products with spikes."""

from __future__ import annotations

from flexsn_nn.exact._exact_products import ExactProducts, LayerProduct, exact_products, plain_products
from flexsn_nn.exact._grid import is_on_grid, whole_numbers
from flexsn_nn.exact._on_grid import Gridded, OnGrid, grid_of, on_grid

__all__ = [
    "ExactProducts",
    "Gridded",
    "LayerProduct",
    "OnGrid",
    "exact_products",
    "grid_of",
    "is_on_grid",
    "on_grid",
    "plain_products",
    "whole_numbers",
]
