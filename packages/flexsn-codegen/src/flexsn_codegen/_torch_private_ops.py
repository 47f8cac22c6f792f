"""The class of torch's ops, which is a private name of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexsn_graph.versions import private

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
else:
    OpOverload = private("torch._ops", "OpOverload", "no source can be generated")
