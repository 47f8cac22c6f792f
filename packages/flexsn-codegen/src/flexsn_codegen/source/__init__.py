"""Source text of kernels: step functions, numbers, numerics, generated modules on disk."""

from __future__ import annotations
