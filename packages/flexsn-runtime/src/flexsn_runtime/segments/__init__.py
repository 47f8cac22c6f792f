"""Scans whose segments of time run side by side, in several kernels instead of one launch."""

from __future__ import annotations
