"""The functions that generated sources call. The base functions have two implementations.

The compiled implementation consists of `@triton.jit` functions that use libdevice. Libdevice does not work in Triton's
interpreter (if `TRITON_INTERPRET=1` is set when triton is imported). There, the base functions are plain functions that
call torch. Both implementations share `_composed`, which contains functions that only call base functions. A generated
source imports this package as `dev`, and runs unchanged with both implementations.
"""

from __future__ import annotations

from flexsn_codegen.targets.triton.device._base import *  # noqa: F403
from flexsn_codegen.targets.triton.device._base import INTERPRETED as INTERPRETED
from flexsn_codegen.targets.triton.device._composed import *  # noqa: F403
from flexsn_codegen.targets.triton.device._exchange import arrive as arrive
from flexsn_codegen.targets.triton.device._exchange import as_bfloat16 as as_bfloat16
from flexsn_codegen.targets.triton.device._exchange import as_float16 as as_float16
from flexsn_codegen.targets.triton.device._exchange import dot as dot
from flexsn_codegen.targets.triton.device._exchange import dot_held as dot_held
from flexsn_codegen.targets.triton.device._exchange import fetch as fetch
from flexsn_codegen.targets.triton.device._exchange import first_part as first_part
from flexsn_codegen.targets.triton.device._exchange import gave_up as gave_up
from flexsn_codegen.targets.triton.device._exchange import hold as hold
from flexsn_codegen.targets.triton.device._exchange import last_part as last_part
from flexsn_codegen.targets.triton.device._exchange import meet as meet
from flexsn_codegen.targets.triton.device._exchange import publish as publish
from flexsn_codegen.targets.triton.device._exchange import rest as rest
from flexsn_codegen.targets.triton.device._exchange import wait as wait
from flexsn_codegen.targets.triton.device._polynomials import *  # noqa: F403
from flexsn_codegen.targets.triton.device._random import *  # noqa: F403
from flexsn_codegen.targets.triton.device._rows import load_pair as load_pair
from flexsn_codegen.targets.triton.device._rows import row_max as row_max
from flexsn_codegen.targets.triton.device._rows import row_min as row_min
from flexsn_codegen.targets.triton.device._rows import row_sum as row_sum
from flexsn_codegen.targets.triton.device._rows import row_var as row_var
from flexsn_codegen.targets.triton.device._rows import store_pair as store_pair
