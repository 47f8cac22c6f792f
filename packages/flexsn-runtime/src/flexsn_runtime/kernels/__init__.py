"""The two kernels of a pointwise scan: chosen, given memory, launched, and joined by autograd."""

from __future__ import annotations
