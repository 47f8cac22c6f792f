"""The forward and the backward kernel of a pointwise scan: their choice, memory, launches and autograd function."""

from __future__ import annotations
