"""What kernels are written for: a language, and how it is compiled."""

from __future__ import annotations

from flexsn_codegen.targets._base import Approximate, KernelWriter, OpCall, Rule, Statement, Target

__all__ = ["Approximate", "KernelWriter", "OpCall", "Rule", "Statement", "Target"]
