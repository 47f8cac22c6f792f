"""Delays of sequences. Their kernels pass over memory two or three times, for any number of different delays."""

from __future__ import annotations

from flexsn_runtime.delays._delayed import delay_between, delay_by_taps, why_no_delay_kernel

__all__ = ["delay_between", "delay_by_taps", "why_no_delay_kernel"]
