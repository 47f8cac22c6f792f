"""What kernels read and write: layouts, and the order of elements in memory."""

from __future__ import annotations
