"""Hooks of what autograd saves, which begin and mostly end without Python."""

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
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`; `None`: the compiled launcher is not loaded.

    They keep as they are what is no result of a node, smaller than `fewest_bytes`, not of floating point, of a type of
    its own, or made by one of the layers; and what `packed` gives nothing for. What was changed in place is refused.

    Args:
        packed: something instead of a tensor.
        unpacked: the tensor again.
        layers: names of nodes, without "Backward" and the digits behind it.
    """
    module = loaded_launcher()
    if module is None:
        return None
    hooks = module.SavingHooks(packed, unpacked, fewest_bytes, set(layers))
    return hooks.pack, hooks.unpack
