"""Layouts of the tensors that kernels read and write, and the order of elements in memory."""

from __future__ import annotations
