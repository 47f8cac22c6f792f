"""Hooks for tensors that autograd saves. They run in the compiled launcher, which calls Python only if necessary."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from flexsn_runtime.native._launcher import loaded_launcher


def saving_hooks(
    packed: Callable[[Tensor], Any | None],
    unpacked: Callable[[Any], Tensor],
    counted: Callable[[int, Any, bool], None],
    fewest_bytes: int,
    views: Collection[str],
    layers: Collection[str],
) -> Any | None:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`; `None` if the compiled launcher is not loaded.

    The hooks keep a tensor unchanged if it is not the result of a node, is smaller than `fewest_bytes`, has no
    floating-point dtype, is an instance of a subclass, or is the result of a node named in `layers`. They also keep a
    tensor unchanged if `packed` returns `None` for it. They raise an error for a tensor that was changed in place.

    Args:
        packed: function that maps a tensor to an object that is saved instead.
        unpacked: function that maps this object back to the tensor.
        counted: function that receives the bytes of each noted memory that is saved, its bits, and `True`.
        views, layers: names of nodes, without "Backward" and the digits after it. The hooks also keep views of a
            layer's result unchanged.

    Returns:
        An object with the hooks `pack` and `unpack`, and with a method `note(tensor, bits, function)`. After a note,
        the hooks save `bits`, an object with an attribute `packed`, for each tensor that covers the whole memory of
        `tensor`. The note is valid as long as the numbers do not change and other references keep `bits` alive.
        `function` reads the numbers, in memory order.
    """
    module = loaded_launcher()
    return (
        None if module is None else module.SavingHooks(packed, unpacked, counted, fewest_bytes, set(views), set(layers))
    )
