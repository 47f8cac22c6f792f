"""Hooks for tensors that autograd saves. They start in the compiled launcher, and call Python only if necessary."""

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
    """Returns hooks for `torch.autograd.graph.saved_tensors_hooks`; `None` if the compiled launcher is not loaded.

    The hooks keep a tensor unchanged if it is not the result of a node, is smaller than `fewest_bytes`, is not of a
    floating-point dtype, is of a subclass, or is the result of a node named in `layers`. They also keep it unchanged if
    `packed` returns `None` for it. They raise an error for a tensor that was changed in place.

    Args:
        packed: function that maps a tensor to an object that is saved instead.
        unpacked: function that maps this object back to the tensor.
        layers: names of autograd nodes, without "Backward" and the digits after it.
    """
    module = loaded_launcher()
    if module is None:
        return None
    hooks = module.SavingHooks(packed, unpacked, fewest_bytes, set(layers))
    return hooks.pack, hooks.unpack
