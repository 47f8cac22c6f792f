"""Lowers recorded ATen graphs to the closed set of ops that kernels are generated from."""

from __future__ import annotations
