"""The functions that each world has its own implementation of."""

from __future__ import annotations

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from flexsn_codegen.device._interpreted import *  # noqa: F403
else:
    from flexsn_codegen.device._compiled import *  # noqa: F403
