"""What generated sources call: one set of names, two implementations.

Compiled, they are `@triton.jit` functions over libdevice. Under Triton's interpreter (`TRITON_INTERPRET=1`
when triton is imported) libdevice does not work, and they are plain functions that call torch. What can be
written with these alone is in `_composed`, for both worlds. A generated source imports this module as `dev`
and runs in both unchanged.
"""

from __future__ import annotations

from flexsn_codegen.targets.triton.device._base import *  # noqa: F403
from flexsn_codegen.targets.triton.device._base import INTERPRETED as INTERPRETED
from flexsn_codegen.targets.triton.device._composed import *  # noqa: F403
from flexsn_codegen.targets.triton.device._polynomials import *  # noqa: F403
