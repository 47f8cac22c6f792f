"""Launches of kernels: generated and handwritten ones in Triton, C++ kernels, clusters, and cooperative launches."""

from __future__ import annotations
