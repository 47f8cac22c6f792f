"""The source text of kernels: functions of one step, numbers, numerics, and the modules on disk with the source."""

from __future__ import annotations
