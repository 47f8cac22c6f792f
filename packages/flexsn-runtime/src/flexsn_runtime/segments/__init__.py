"""Scans whose segments of time run side by side: several kernels in the place of one launch."""

from __future__ import annotations
