"""Traces of each kind of function: pointwise steps, recurrent steps, functions without time, functions that cut."""

from __future__ import annotations
