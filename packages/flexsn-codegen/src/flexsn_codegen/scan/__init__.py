"""Scan kernels: a step function in a loop over time, forward and backward."""

from __future__ import annotations

from flexsn_codegen.scan._backward import backward_source
from flexsn_codegen.scan._forward import forward_source
from flexsn_codegen.scan._spec import BackwardSpec, ForwardSpec

__all__ = ["BackwardSpec", "ForwardSpec", "backward_source", "forward_source"]
