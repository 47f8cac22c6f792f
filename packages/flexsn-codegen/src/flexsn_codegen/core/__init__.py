"""Turns a graph into the function of one step, in the language of a target."""

from __future__ import annotations
