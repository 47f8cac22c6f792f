"""Scans whose segments of time run in parallel. Such a scan consists of several kernels instead of one."""

from __future__ import annotations
