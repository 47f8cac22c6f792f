"""Mean and variance per channel, for norms."""

from __future__ import annotations

from flexsn_runtime.moments._moments import batch_moments, batch_moments_op, has_moments

__all__ = ["batch_moments", "batch_moments_op", "has_moments"]
