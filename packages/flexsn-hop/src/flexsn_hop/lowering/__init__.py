"""The operator in compiled graphs: registered kernels, PyTorch's own loops, opaque loops."""

from __future__ import annotations
