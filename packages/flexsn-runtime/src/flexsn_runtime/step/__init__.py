"""A traced step, together with its kernels."""

from __future__ import annotations
