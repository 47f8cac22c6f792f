"""Turns a graph into the source of a function that computes one step, in the language of a target."""

from __future__ import annotations
