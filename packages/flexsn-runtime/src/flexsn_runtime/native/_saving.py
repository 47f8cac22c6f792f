"""Hooks for tensors that autograd saves. They start in the compiled launcher, and call Python only if necessary."""

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

    The hooks keep a tensor unchanged if it is not the result of a node, is smaller than `fewest_bytes`, is not of a
    floating-point dtype, is of a subclass, or is the result of a node named in `layers`. They also keep it unchanged if
    `packed` returns `None` for it. They raise an error for a tensor that was changed in place.

    Args:
        packed: maps a tensor to an object that is saved instead.
        unpacked: maps this object back to the tensor.
        counted: receives the bytes of each noted memory that is saved, its bits, and `True`.
        views, layers: names of nodes, without "Backward" and the digits after it. Results of views of a layer's result
            are kept as they are, too.

    Returns:
        An object with the hooks `pack` and `unpack`; and with `note(tensor, bits, function)`, which makes the hooks
        keep `bits`, an object with an attribute `packed`, for each tensor that has all memory of this one, as long as
        its numbers do not change and other references keep the bits alive. The function reads the numbers, in the
        order of their memory.
    """
    module = loaded_launcher()
    return (
        None if module is None else module.SavingHooks(packed, unpacked, counted, fewest_bytes, set(views), set(layers))
    )
