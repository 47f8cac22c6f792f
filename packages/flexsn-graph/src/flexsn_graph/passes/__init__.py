"""Analyses step graphs, and rewrites graphs that have certain properties."""

from __future__ import annotations
