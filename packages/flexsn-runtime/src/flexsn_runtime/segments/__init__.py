"""Scans whose segments of time run in parallel, in several kernels instead of one launch."""

from __future__ import annotations
