"""Lowers recorded ATen graphs to the closed set of ops for which kernels can be generated."""

from __future__ import annotations
