"""Scans whose segments of time run in parallel. They take several kernels instead of one."""

from __future__ import annotations
