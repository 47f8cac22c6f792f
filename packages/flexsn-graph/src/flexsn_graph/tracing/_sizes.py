"""Lists the torch functions through which a core can depend on the sizes of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_METHODS = """
    as_strided broadcast_to chunk dsplit expand gather hsplit index_add index_copy index_fill index_select narrow
    nelement new_empty new_empty_strided new_full new_ones new_zeros numel put repeat repeat_interleave reshape resize_
    roll scatter select size slice_scatter split split_with_sizes storage_offset stride sum_to_size take take_along_dim
    tensor_split tile unbind unflatten unfold view vsplit __getitem__ __iter__ __len__ __setitem__
"""
_FUNCTIONS = """
    arange block_diag cartesian_prod cat column_stack concat concatenate diag_embed dstack empty empty_strided eye full
    hstack linspace logspace meshgrid ones row_stack stack tensordot tril_indices triu_indices vstack zeros
"""
_NN_FUNCTIONS = "fold interpolate one_hot pad pixel_shuffle pixel_unshuffle unfold"


def _find_functions(owner: Any, names: str) -> set[Any]:
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


# Functions that work along one dimension, by name, with the position of the argument `dim`.
_ALONG_ONE = {
    **dict.fromkeys(["cat", "concat", "concatenate", "gather", "index_select"], 1),
    **dict.fromkeys(["narrow", "select", "size", "unbind", "unflatten"], 1),
    **dict.fromkeys(["chunk", "repeat_interleave", "split", "tensor_split"], 2),
}


def depends_on_batch(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> bool:
    """True if a call may depend on the first size of its tensors, which have `ndim` dimensions."""
    if func not in OF_SIZES:
        return False
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not (index[0] is Ellipsis and len(index) <= ndim) and not _is_full_slice(index[0])
    if func in _DIMENSIONS:
        position = _DIMENSIONS[func]
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        return not isinstance(dim, int) or dim % max(ndim, 1) == 0
    return True


def _is_full_slice(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


# If the core calls one of these functions, a kernel for one size of the arguments may be wrong for other sizes.
OF_SIZES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "nbytes")),
        *_find_functions(Tensor, _METHODS),
        *_find_functions(torch, _METHODS),
        *_find_functions(torch, _FUNCTIONS),
        *_find_functions(functional, _NN_FUNCTIONS),
    }
)
_DIMENSIONS: dict[Callable[..., Any], int] = {
    getattr(owner, name): place
    for owner in (Tensor, torch)
    for name, place in _ALONG_ONE.items()
    if hasattr(owner, name)
}
