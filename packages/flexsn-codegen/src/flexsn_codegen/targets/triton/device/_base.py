"""Selects the implementation of the base functions: compiled, or for Triton's interpreter."""

from __future__ import annotations

import triton

from flexsn_codegen.targets.triton import _triton_private as _triton_private  # checks this version of Triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from flexsn_codegen.targets.triton.device._interpreted import *  # noqa: F403
else:
    from flexsn_codegen.targets.triton.device._compiled import *  # noqa: F403
