"""Pooling in two dimensions. The kernels take only as long as reading the input and writing the result."""

from __future__ import annotations

from flexsn_runtime.pooling._average import average_pool
from flexsn_runtime.pooling._maximum import max_pool
from flexsn_runtime.pooling._window import Window, why_no_kernel

__all__ = ["Window", "average_pool", "max_pool", "why_no_kernel"]
