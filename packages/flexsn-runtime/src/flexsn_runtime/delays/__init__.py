"""Delays of sequences. Their kernels read and write two or three sequences in all, for any number of delays."""

from __future__ import annotations

from flexsn_runtime.delays._delayed import delay_between, delay_by_taps, why_no_delay_kernel

__all__ = ["delay_between", "delay_by_taps", "why_no_delay_kernel"]
