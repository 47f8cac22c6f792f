"""Lowerings of the operator in compiled graphs: to registered kernels, to PyTorch's operators, and to loops."""

from __future__ import annotations
