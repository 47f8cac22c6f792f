"""The target C++, for kernels on the CPU."""

from __future__ import annotations

from flexsn_codegen.targets.cpp._compiler import library_of, why_no_compiler
from flexsn_codegen.targets.cpp._extension import Extension
from flexsn_codegen.targets.cpp._inline import Inlined, inlined
from flexsn_codegen.targets.cpp._kernel import CppKernel, Program, program
from flexsn_codegen.targets.cpp._target import CPP, Cpp

__all__ = [
    "CPP",
    "Cpp",
    "CppKernel",
    "Extension",
    "Inlined",
    "Program",
    "inlined",
    "library_of",
    "program",
    "why_no_compiler",
]
