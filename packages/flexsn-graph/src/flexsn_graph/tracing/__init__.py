"""Runs a core on fake tensors: recording, captured tensors, refusals."""

from __future__ import annotations
