"""Launch settings of kernels: blocks, chunks and warps by the size of a step, from tables or measurements."""

from __future__ import annotations
