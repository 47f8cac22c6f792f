"""The class of torch's ops, which is private; apart, because what is said of ops needs nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexsn_graph.versions import private

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
else:
    OpOverload = private("torch._ops", "OpOverload", "step functions cannot be traced")
