"""A traced step with its kernels."""

from __future__ import annotations
