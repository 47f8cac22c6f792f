"""The two kernels of a pointwise scan: their choice, memory and launches, and their connection by autograd."""

from __future__ import annotations
