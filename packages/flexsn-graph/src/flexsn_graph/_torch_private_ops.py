"""Private names of torch for the tracing code: the class of torch's ops, and trees of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexsn_graph.versions import expect, private

_NO_TRACE = "step functions cannot be traced, and nothing can be compiled"

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.utils import _pytree as pytree
else:
    OpOverload = private("torch._ops", "OpOverload", _NO_TRACE)
    pytree = private("torch.utils", "_pytree", _NO_TRACE)

__all__ = ["OpOverload", "pytree"]

expect(
    "torch.utils._pytree",
    ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"],
    _NO_TRACE,
)
