"""Traces pointwise steps, recurrent steps, steps on pieces, functions without time, and functions that cut tensors."""

from __future__ import annotations
