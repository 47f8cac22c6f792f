"""Targets of kernels. A target is a language with its compiler."""

from __future__ import annotations

from flexsn_codegen.targets._base import (
    WORD,
    Approximate,
    KernelWriter,
    OpCall,
    RowLaunch,
    Rule,
    Statement,
    Summed,
    Target,
)

__all__ = ["WORD", "Approximate", "KernelWriter", "OpCall", "RowLaunch", "Rule", "Statement", "Summed", "Target"]
