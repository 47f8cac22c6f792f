"""Hooks of tensors that autograd saves, which begin without Python and usually end without it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from flexsn_runtime.native._launcher import loaded_launcher

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def saving_hooks(
    packed: Callable[[Tensor], Any | None], unpacked: Unpack, fewest_bytes: int, layers: Collection[str]
) -> tuple[Pack, Unpack] | None:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`; `None` if the compiled launcher is not loaded.

    They keep a tensor as it is if it is not the result of a node, is smaller than `fewest_bytes`, is not of a
    floating-point dtype, is of a subclass, or was made by one of the layers; also if `packed` returns `None` for it.
    They refuse a tensor that was changed in place.

    Args:
        packed: maps a tensor to an object that is saved instead.
        unpacked: maps this object back to the tensor.
        layers: names of nodes, without "Backward" and the digits after it.
    """
    module = loaded_launcher()
    if module is None:
        return None
    hooks = module.SavingHooks(packed, unpacked, fewest_bytes, set(layers))
    return hooks.pack, hooks.unpack
