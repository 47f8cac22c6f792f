"""PyTorch's functions for pytrees, which are nested containers of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexsn_hop.versions import private

_NO_TREES = "`scan` has no trees of inputs, carries and outputs"

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec as TreeSpec
else:
    TreeSpec = private("torch.utils._pytree", "TreeSpec", _NO_TREES)

tree_flatten = private("torch.utils._pytree", "tree_flatten", _NO_TREES)
tree_unflatten = private("torch.utils._pytree", "tree_unflatten", _NO_TREES)
tree_flatten_with_path = private("torch.utils._pytree", "tree_flatten_with_path", _NO_TREES)
keystr = private("torch.utils._pytree", "keystr", _NO_TREES)
